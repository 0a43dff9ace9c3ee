"""`MtpProposer`: the target's own MTP layers draft from its hidden states.

Owns whose layers they are. How they keep up with the text is `FollowingProposer`'s, how they run `MtpRunner`'s.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from specdec.heads.mtp.head import MtpHead
from specdec.heads.mtp.loading import load
from specdec.heads.mtp.runner import MtpRunner
from specdec.models.hidden_states import FINAL, Taps
from specdec.models.int8_linear import int8_pays, with_int8_linears
from specdec.proposers.base import Context
from specdec.proposers.draft_heads.feature_proposer import Follower, FollowingProposer, RecordableFollower
from specdec.proposers.draft_models.draft_nodes import Stepped
from specdec.sampling.dynamic_tree import DynamicTree


class MtpProposer(FollowingProposer):
    """Drafts chains by default, as long as pays; trees where asked for.

    transformers drops a target's MTP layers when it loads the target: they are read from where it was loaded from, once
    for each target. A single layer is used again for every further token; of several each drafts one, in turn. On CPUs
    their weights are read as 8-bit integers where that is faster: a draft need not be exact, it is verified.

    Args:
        head: the layers, or a folder or hub id that holds them; None: where the target was loaded from.
        branching: the draft's shape, see `AutoregressiveProposer`.
        tree: likewise.
        draw: how the draft is chosen, see there.
    """

    def __init__(
        self,
        head: MtpHead | str | None = None,
        *,
        branching: Sequence[int] | None = None,
        tree: DynamicTree | None = None,
        draw: bool = True,
    ):
        super().__init__(branching=branching, tree=tree, draw=draw)
        self.head = head
        self._heads = WeakIdKeyDictionary()  # as they draft, by the configs of their targets, which views of them share

    def check(self, target: PreTrainedModel) -> None:
        if target.config not in self._heads:
            head = self.head if isinstance(self.head, MtpHead) else load(target, self.head)
            self._heads[target.config] = with_int8_linears(head) if int8_pays(head) else head
        self._head = self._of(target)

    def taps(self, target: PreTrainedModel) -> Taps:
        return Taps(target, [FINAL], self._of(target).device)

    def drafting_model(self) -> nn.Module:
        return self._head

    def begin(self, context: Context) -> None:
        assert context.target is not None
        head = self._of(context.target)
        self.runner = MtpRunner(head, sized=context.recorder is not None and len(head.layers) == 1)
        self.runner.start(context.batch_size)
        super().begin(context)

    def _of(self, target: PreTrainedModel) -> MtpHead:
        return self._heads[target.config]

    @property
    def follower(self) -> Follower:
        return self.runner

    @property
    def recordable(self) -> RecordableFollower | None:
        """Of several layers each has rows of its own."""
        return self.runner if len(self.runner.layers) == 1 else None

    def _step(self, stepped: Stepped, n: int, parents: Tensor | None, chain: bool) -> Tensor:
        logits = self.runner.grow(stepped.tokens, n, parents, stepped.depth, stepped.seen, stepped.levels, chain)
        return logits.to(stepped.tokens.device)

    def _full(self, logits: Tensor, vocab_size: int) -> Tensor:
        missing = vocab_size - logits.shape[-1]
        if missing <= 0:
            return logits[..., :vocab_size]
        return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
