"""Muon for a head's matrices and AdamW for all other weights, as one optimizer.

Muon (https://kellerjordan.github.io/posts/muon/) makes each update of a matrix nearly orthogonal. Embeddings, LM heads
and vectors are updated by AdamW.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer


class CombinedOptimizer(Optimizer):
    """Several optimizers of disjoint weights, used as one. Schedulers see the parameter groups of all."""

    def __init__(self, parts: list[Optimizer]):
        self.parts = parts
        super().__init__([weight for part in parts for group in part.param_groups for weight in group["params"]], {})
        self.param_groups = [group for part in parts for group in part.param_groups]

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else closure()
        for part in self.parts:
            part.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]


def matrices(head: nn.Module) -> list[Tensor]:
    """Return the weights of a head that Muon updates: those of linear layers except the LM head."""
    layers = [m for name, m in head.named_modules() if isinstance(m, nn.Linear) and not name.endswith("lm_head")]
    return [layer.weight for layer in layers]


def muon(head: nn.Module, learning_rate: float, betas: tuple[float, float]) -> Optimizer:
    """Create the optimizer of a head. Muon's updates are scaled to AdamW's size (2502.16982). betas: AdamW's."""
    shaped = matrices(head)
    known = {id(weight) for weight in shaped}
    others = [weight for weight in head.parameters() if id(weight) not in known]
    return CombinedOptimizer(
        [
            Muon(shaped, lr=learning_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
            AdamW(others, lr=learning_rate, betas=betas, weight_decay=0.0),
        ]
    )
