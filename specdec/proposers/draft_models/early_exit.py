"""`EarlyExitProposer`: the target's own first layers draft, through its final norm and LM head (LayerSkip).

The shorter model shares the target's cache. The keys and values that a draft writes there are overwritten by the
target's own pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from specdec.models.introspection import decoder_layers, is_sharded
from specdec.models.recurrent_layers import has_states
from specdec.models.runner import ModelRunner
from specdec.models.views import view
from specdec.proposers.context import Context
from specdec.proposers.draft_models.autoregressive import AutoregressiveProposer
from specdec.proposers.draft_models.draft_nodes import DraftNodes
from specdec.sampling.draft_tree import DraftTree
from specdec.sampling.dynamic_tree import DynamicTree
from specdec.sampling.results import RoundResult
from specdec.utils.device_copies import uploaded
from specdec.utils.timing import clock


class EarlyExitProposer(AutoregressiveProposer):
    """Drafts with the target's own first layers (LayerSkip, arXiv 2404.16710).

    Use it with models trained with an early-exit loss. The proposer has no weights and no cache of its own, and needs
    no prefill. Drafts are chains by default.

    Args:
        layers: the number of the target's layers that draft.
        branching: the number of children per node at each depth of a fixed tree, see `AutoregressiveProposer`.
        tree: the settings of a dynamic tree.
        draw: True to draw drafts from q where the rule allows it, see `AutoregressiveProposer`.

    Raises:
        ValueError: `layers` is below 1; for a target, if it has too few layers, recurrent layers, or is sharded.

    Example:
        ```python
        model = AutoModelForCausalLM.from_pretrained("facebook/layerskip-llama3.2-1B")
        spec = SpeculativeGenerator(model, EarlyExitProposer(layers=4))
        ```
    """

    def __init__(
        self,
        layers: int,
        *,
        branching: Sequence[int] | None = None,
        tree: DynamicTree | None = None,
        draw: bool = True,
    ):
        super().__init__(branching=branching, tree=tree, draw=draw)
        if layers < 1:
            raise ValueError(f"layers must be at least 1, got {layers}")
        self.layers = layers
        self._shorter: PreTrainedModel | None = None

    def check(self, target: PreTrainedModel) -> None:
        count = len(decoder_layers(target))
        if self.layers >= count:
            raise ValueError(f"layers must be less than the target's {count} layers, got {self.layers}")
        if has_states(target):
            raise ValueError(
                f"{type(target).__name__} has recurrent layers, whose states an early-exit draft would change: use "
                "another proposer"
            )
        if is_sharded(target):
            raise ValueError(
                "the target is sharded over several processes, which an early-exit draft does not support: use another "
                "proposer"
            )
        self._shorter = shorter(target, self.layers)

    def drafting_model(self) -> nn.Module | None:
        return self._shorter

    def begin(self, context: Context) -> None:
        super().begin(context)
        assert context.target is not None
        assert context.call.cache is not None
        self.runner = ModelRunner(
            shorter(context.target, self.layers), context.call.masks, encoder_outputs=context.call.encoder_outputs
        )
        self.runner.cache = context.call.cache

    def observe(self, draft: DraftTree, result: RoundResult, accepted: Sequence[int]) -> None:
        super().observe(draft, result, accepted)
        self.runner.drop_draft()

    def _backlog(self, context: Context) -> int:
        return 0

    def _catch_up(self, context: Context) -> Tensor:
        """Process the root; the target's cache already holds all tokens before it."""
        start, root = clock(), context.root[:, None]
        self.runner.drop_draft()
        deepest = [budget if active else -1 for budget, active in zip(context.budget, context.active, strict=True)]
        self._deepest_nodes = uploaded(deepest, root.device)[:, None] if min(deepest) < 1 else None
        depth = self._placed(torch.zeros_like(root))
        logits = self.runner.grow(root, depth, torch.ones_like(root)[..., None].bool(), chain=True).logits
        self._book_pass(context, logits, clock() - start)
        return logits.to(root.device)

    def _step(self, stepped: DraftNodes) -> Tensor:
        depth = pad(stepped.depth + 1, (1, 0))  # the root is a node here
        seen = None if stepped.seen is None else pad(stepped.seen, (1, 0), value=True)
        return self.runner.grow(stepped.newest, self._placed(depth), seen, chain=stepped.is_chain).logits

    def _placed(self, depth: Tensor) -> Tensor:
        """Depths (B, M) int64, capped so that rows without a budget stay within the target's positions."""
        return depth if self._deepest_nodes is None else torch.minimum(depth, self._deepest_nodes)


def shorter(target: PreTrainedModel, layers: int) -> PreTrainedModel:
    """A view of the target that ends after its first `layers` layers."""
    first = nn.ModuleList(decoder_layers(target)[:layers])
    (whole,) = [
        child
        for child in target.get_decoder().children()
        if isinstance(child, nn.ModuleList) and len(child) and child[0] is first[0]
    ]
    return view(target, lambda module: first if module is whole else module)
