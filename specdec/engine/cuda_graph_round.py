"""`RecordedPass`: the target's pass over a draft, what it decides, and keeping what is accepted, as one launch.

Owns which rounds can be recorded. What is done in them is the target's runner's and `verification`'s.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from specdec.engine.transcript import Transcript
from specdec.engine.verifier import BatchedVerifier, Verified, outcome_sent, written
from specdec.models.cuda_graphs import WARM, Named, Recorder
from specdec.models.runner import ModelRunner
from specdec.models.static_forward import nodes_of_size
from specdec.sampling.draft_tree import DraftTree
from specdec.sampling.results import NewTokens, Verdict, features_at
from specdec.utils.device_copies import uploaded

SELDOM = 4  # rounds of a call
Shape = tuple[bool, int | None]  # of drafts: chains or not, and how deep they may be


@dataclass(frozen=True)
class LaunchedPass:
    """A round that a device was asked for.

    Attributes:
        verdict, gained: as the device has them. new: (B, D), see `Verdict.new_tokens`.
    """

    verdict: Verdict
    new_tokens: NewTokens
    new: Tensor

    def sent(self, draft: DraftTree, text: Transcript) -> Callable[[], Verified]:
        """On its way to the host; what is returned waits for it, and writes it into the text."""
        outcome = outcome_sent(draft, self.verdict, self.new)
        return lambda: written(self.verdict, outcome(), self.new, text, moved=True)


@dataclass
class RecordedPass:
    """Of one call.

    Args:
        target: its runner, of few sizes. verify: its choices at all nodes. recorder: of the call.
    """

    target: ModelRunner
    verify: BatchedVerifier
    recorder: Recorder
    _wanted: dict[Shape, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))  # rounds by nodes
    _run: dict[Shape, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))  # as they were filled up

    @classmethod
    def of(cls, target: ModelRunner, verify: object, recorder: Recorder | None) -> RecordedPass | None:
        """None where the call has no recorder, or decides in another way."""
        return cls(target, verify, recorder) if recorder is not None and isinstance(verify, BatchedVerifier) else None

    def takes(self, draft: DraftTree, text: Transcript) -> bool:
        """Nothing but tensors has a say in the round."""
        known = draft.probs is None and (draft.chain or draft.levels is not None)
        alone = self.verify.processors.read_scores_alone and not text.records.wanted
        scores = len(draft.tokens) * nodes_of_size(draft.size) * self.target.config.vocab_size
        return known and alone and not self.recorder.refused and scores <= BatchedVerifier.MOST

    def launched(self, draft: DraftTree, text: Transcript) -> LaunchedPass:
        full, target = _filled_up(draft, self._size(draft)), self.target
        sizes = target.reserve(full.size)
        rows = {"lengths": target.lengths} | ({} if text.deepest is None else {"deepest": text.deepest})
        columns = uploaded(list(rows.values()), full.tokens.device)[..., None]  # (B, 1) each
        inputs = {"tokens": full.tokens, "parents": full.parents, **dict(zip(rows, columns, strict=True))}
        noise = self.verify.noise_for(full, text)
        if noise is not None:
            inputs["noise"] = noise
        key = ("pass", self.verify.processors.names, full.chain, full.levels, sizes)
        made = self.recorder(self, key, partial(self._made, full.chain, full.levels), inputs)
        target.pending = full.size
        verdict = Verdict(made["path"], made["accepted"], made["next_token"])
        new_tokens = NewTokens(made["tokens"], made["pads"], made.get("states"))
        return LaunchedPass(verdict, new_tokens, made["new"])

    def _size(self, draft: DraftTree) -> int:
        """Nodes to fill a draft up to: the next size, or a larger one that is recorded, while that is asked for seldom.

        An eager pass, or to record one, takes longer than a replayed one over more nodes.
        """
        shape, own = (draft.chain, draft.levels), nodes_of_size(draft.size)
        wanted, run = self._wanted[shape], self._run[shape]
        wanted[own] += 1
        size = own
        if run[own] <= WARM and wanted[own] <= SELDOM:
            size = min((nodes for nodes, rounds in run.items() if nodes > own and rounds > WARM), default=own)
        run[size] += 1
        return size

    def _made(
        self,
        chain: bool,
        levels: int | None,
        tokens: Tensor,
        parents: Tensor,
        lengths: Tensor,
        deepest: Tensor | None = None,
        noise: Tensor | None = None,
    ) -> Named:
        """What is recorded. lengths: (B, 1) int64. deepest: likewise, see `Transcript`. noise: see `BatchedVerifier`."""
        draft, target = DraftTree(tokens, parents, chain=chain, levels=levels), self.target
        target.device_lengths = lengths
        try:
            depth = draft.depth if deepest is None else torch.minimum(draft.depth, deepest)
            output = target.grow(draft.tokens, depth, draft.ancestors, chain=chain)
        finally:
            target.device_lengths, target.pending = None, 0
        verdict = self.verify.chosen(draft, self.verify.processors(output.logits, list), noise)
        if not chain:
            target.cache.move(lengths, verdict.path)
        made = {"path": verdict.path, "accepted": verdict.accepted, "next_token": verdict.next_token}
        made["new"] = verdict.new_tokens(draft)
        return made | _new_tokens(verdict, made["new"], output.features)


def _new_tokens(verdict: Verdict, new: Tensor, features: Tensor | None) -> Named:
    """What `NewTokens` is made of. new: (B, D). features: (B, N, C) of the draft's nodes."""
    most = new.shape[1]
    pads = most - 1 - verdict.accepted
    place = (torch.arange(most, device=new.device) - pads[:, None]).clamp(min=0)  # on the path, (B, D)
    states = None if features is None else features_at(features, verdict.path.gather(1, place))
    new_tokens = NewTokens(new.gather(1, place), pads, states).padded(nodes_of_size(most))
    made = {"tokens": new_tokens.tokens, "pads": new_tokens.pads}
    return made if new_tokens.states is None else made | {"states": new_tokens.states}


def _filled_up(draft: DraftTree, size: int) -> DraftTree:
    """With padding."""
    more = size - draft.size
    if not more:
        return draft
    tokens, parents = nn.functional.pad(draft.tokens, (0, more)), nn.functional.pad(draft.parents, (0, more), value=-1)
    return replace(draft, tokens=tokens, parents=parents, confidence_bins=None, notes={})
