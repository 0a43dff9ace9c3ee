"""`muon`: torch's Muon for a head's matrices beside AdamW for all else, as one optimizer.

Muon (https://kellerjordan.github.io/posts/muon/) makes each update of a matrix nearly orthogonal. Embeddings and LM
heads, whose rows are tokens', stay AdamW's, as do vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer


class Together(Optimizer):
    """Several optimizers of different weights; schedulers see all their groups."""

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
    """Those of a head's weights that Muon is for."""
    layers = [m for name, m in head.named_modules() if isinstance(m, nn.Linear) and not name.endswith("lm_head")]
    return [layer.weight for layer in layers]


def muon(head: nn.Module, learning_rate: float, betas: tuple[float, float]) -> Optimizer:
    """For a head's weights. learning_rate: of both: Muon's updates are scaled to AdamW's size (2502.16982)."""
    shaped = matrices(head)
    known = {id(weight) for weight in shaped}
    others = [weight for weight in head.parameters() if id(weight) not in known]
    return Together(
        [
            Muon(shaped, lr=learning_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
            AdamW(others, lr=learning_rate, betas=betas, weight_decay=0.0),
        ]
    )
