"""`EarlyExitProposer`: the target's own first layers draft, through its final norm and LM head.

Owns the shorter model. It reads the text from the target's cache: the keys and values of its layers are the target's,
and what a draft writes there the target's own pass writes again. LayerSkip, 2404.16710.
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
from specdec.proposers.base import Context
from specdec.proposers.draft_models.autoregressive import AutoregressiveProposer
from specdec.proposers.draft_models.draft_nodes import Stepped
from specdec.sampling.draft_tree import DraftTree
from specdec.sampling.dynamic_tree import DynamicTree
from specdec.sampling.results import Verdict
from specdec.utils.device_copies import uploaded
from specdec.utils.timing import clock


class EarlyExitProposer(AutoregressiveProposer):
    """Drafts chains by default, as long as pays; trees where asked for. For models trained to be left early.

    No weights and no keys or values of its own: nothing is read twice, and no prompt.

    Args:
        layers: how many of the target's layers draft.
        branching: the draft's shape, see `AutoregressiveProposer`.
        tree: likewise.
        draw: how the draft is chosen, see there.
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
            raise ValueError(f"at least one layer must draft, got {layers}")
        self.layers = layers
        self._shorter: PreTrainedModel | None = None

    def check(self, target: PreTrainedModel) -> None:
        count = len(decoder_layers(target))
        if self.layers >= count:
            raise ValueError(f"the target has {count} layers: fewer must draft, got {self.layers}")
        if has_states(target):
            raise ValueError(
                f"{type(target).__name__} has recurrent layers, whose states a draft of its own layers would change"
            )
        if is_sharded(target):
            raise ValueError("the target's weights lie in several processes, which would have to draft together")
        self._shorter = shorter(target, self.layers)

    def drafting_model(self) -> nn.Module | None:
        return self._shorter

    def begin(self, context: Context) -> None:
        super().begin(context)
        assert context.target is not None
        assert context.cache is not None
        self.runner = ModelRunner(
            shorter(context.target, self.layers), context.masks, encoder_outputs=context.encoder_outputs
        )
        self.runner.cache = context.cache

    def observe(self, draft: DraftTree, verdict: Verdict, accepted: Sequence[int]) -> None:
        super().observe(draft, verdict, accepted)
        self.runner.pending = 0

    def _backlog(self, context: Context) -> int:
        return 0

    def _catch_up(self, context: Context) -> Tensor:
        """The target has read all but the root."""
        start, root = clock(), context.root[:, None]
        self.runner.pending = 0
        deepest = [budget if active else -1 for budget, active in zip(context.budget, context.active, strict=True)]
        self._deepest_nodes = uploaded(deepest, root.device)[:, None] if min(deepest) < 1 else None
        depth = self._placed(torch.zeros_like(root))
        logits = self.runner.grow(root, depth, torch.ones_like(root)[..., None].bool(), chain=True).logits
        self._book_pass(context, logits, clock() - start)
        return logits.to(root.device)

    def _step(self, stepped: Stepped, n: int, parents: Tensor | None, chain: bool) -> Tensor:
        depth, seen = pad(stepped.depth + 1, (1, 0)), pad(stepped.seen, (1, 0), value=True)  # the root is pending, too
        logits = self.runner.grow(stepped.tokens[:, -n:], self._placed(depth), seen, chain=chain).logits
        return logits.to(stepped.tokens.device)

    def _placed(self, depth: Tensor) -> Tensor:
        """(B, M) int64, with the nodes of rows that draft nothing where the target has positions."""
        return depth if self._deepest_nodes is None else torch.minimum(depth, self._deepest_nodes)

    def _full(self, logits: Tensor, vocab_size: int) -> Tensor:
        return logits


def shorter(target: PreTrainedModel, layers: int) -> PreTrainedModel:
    """A view of the target that ends after so many of its layers."""
    first = nn.ModuleList(decoder_layers(target)[:layers])
    (whole,) = [
        child
        for child in target.get_decoder().children()
        if isinstance(child, nn.ModuleList) and len(child) and child[0] is first[0]
    ]
    return view(target, lambda module: first if module is whole else module)
