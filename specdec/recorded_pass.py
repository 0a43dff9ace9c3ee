"""`RecordedPass`: the target's pass over a draft, what it decides, and keeping what is accepted, as one launch.

Owns which rounds can be recorded. What is done in them is the target's runner's and `verification`'s.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor, nn

from specdec.graphs import nodes_of_size
from specdec.recording import Named, Recorder
from specdec.runner import ModelRunner
from specdec.transcript import Transcript
from specdec.transfer import uploaded
from specdec.tree import DraftTree, Verdict
from specdec.verification import AllChoices, Verified, outcome_of, written


@dataclass
class RecordedPass:
    """Of one call.

    Args:
        target: its runner, of few sizes. verify: its choices at all nodes. recorder: of the call.
    """

    target: ModelRunner
    verify: AllChoices
    recorder: Recorder

    @classmethod
    def of(cls, target: ModelRunner, verify: object, recorder: Recorder | None) -> RecordedPass | None:
        """None where the call has no recorder, or decides in another way."""
        return cls(target, verify, recorder) if recorder is not None and isinstance(verify, AllChoices) else None

    def takes(self, draft: DraftTree, text: Transcript) -> bool:
        """Nothing but tensors has a say in the round."""
        known = draft.probs is None and (draft.chain or draft.levels is not None)
        alone = self.verify.processors.read_scores_alone and not text.records.wanted
        scores = len(draft.tokens) * nodes_of_size(draft.size) * self.target.config.vocab_size
        return known and alone and not self.recorder.refused and scores <= AllChoices.MOST

    def launched(self, draft: DraftTree, text: Transcript) -> Named:
        """The round as the device has it: "features" (B, N, C) of the nodes, if any are tapped, and what is for
        `settled`."""
        full, target = _filled_up(draft), self.target
        sizes = target.reserve(full.size)
        inputs = {
            "tokens": full.tokens,
            "parents": full.parents,
            "lengths": uploaded(target.lengths, full.tokens.device)[:, None],
        }
        noise = self.verify.noise_for(full, text)
        if noise is not None:
            inputs["noise"] = noise
        key = (id(self), full.chain, full.levels, sizes)
        made = self.recorder(key, partial(self._made, full.chain, full.levels), inputs)
        target.pending = full.size
        return made

    def settled(self, draft: DraftTree, made: Named, text: Transcript) -> Verified:
        """The same on the host, and in the text."""
        verdict = Verdict(made["path"], made["accepted"], made["next_token"])
        return written(verdict, outcome_of(draft, verdict, made["new"]), made["new"], text, moved=True)

    def _made(
        self,
        chain: bool,
        levels: int | None,
        tokens: Tensor,
        parents: Tensor,
        lengths: Tensor,
        noise: Tensor | None = None,
    ) -> Named:
        """What is recorded. lengths: (B, 1) int64. noise: see `AllChoices`."""
        draft, target = DraftTree(tokens, parents, chain=chain, levels=levels), self.target
        target.there = lengths
        try:
            output = target.grow(draft.tokens, draft.depth, draft.ancestors, chain=chain)
        finally:
            target.there, target.pending = None, 0
        verdict = self.verify.chosen(draft, self.verify.processors(output.logits, list), noise)
        if not chain:
            target.cache.move(lengths, verdict.path)
        made = {"path": verdict.path, "accepted": verdict.accepted, "next_token": verdict.next_token}
        made["new"] = verdict.new_tokens(draft)
        return made if output.features is None else made | {"features": output.features}


def _filled_up(draft: DraftTree) -> DraftTree:
    """With padding up to the next size of a pass."""
    more = nodes_of_size(draft.size) - draft.size
    if not more:
        return draft
    tokens, parents = nn.functional.pad(draft.tokens, (0, more)), nn.functional.pad(draft.parents, (0, more), value=-1)
    return replace(draft, tokens=tokens, parents=parents, keys=None, notes={})
