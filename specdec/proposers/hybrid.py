"""`HybridProposer`: n-grams where the text repeats itself, a model's drafts elsewhere.

Owns the choice between the two, once per round; SuffixDecoding's hybrid (arXiv 2411.04975, section 4.2) makes it by a
fixed threshold on the n-grams' score, here it is made by expected tokens per second.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from transformers import PreTrainedModel

from specdec.pacing import Pacer
from specdec.proposers.base import Context, Proposer
from specdec.proposers.ngram import NgramProposer
from specdec.taps import Taps
from specdec.tree import DraftTree, Verdict


class HybridProposer(Proposer):
    """Lets the n-grams draft where they promise more tokens per second than the other proposer's recent drafts brought.

    Which of them drafts depends on the text so far and on costs, never on what is drawn: the output stays the target's.

    Args:
        other: an EAGLE-3 head, a draft model, or a proposer of your own that has `follow` if it needs it.
        ngram: what looks the text up; `NgramProposer()` by default.
    """

    FORGET = 0.9

    def __init__(self, other: Proposer, ngram: NgramProposer | None = None):
        self.other, self.ngram = other, NgramProposer() if ngram is None else ngram
        self._drafting: Proposer = other
        self._tokens = self._seconds = 0.0  # of the other's recent rounds, moving sums
        self._drafted_in = 0.0  # seconds that its draft of this round took
        self._pacer: Pacer | None = None
        self._rows: list[int] = []

    def taps(self, target: PreTrainedModel) -> Taps | None:
        return self.other.taps(target)

    def check(self, target: PreTrainedModel) -> None:
        self.other.check(target)
        self.ngram.check(target)

    def begin(self, context: Context) -> None:
        self.other.begin(context)
        self.ngram.begin(context)

    def propose(self, context: Context) -> DraftTree:
        self._pacer, self._rows = context.pacer, context.rows
        gains = self.ngram.expect(context)
        if self._lookup_pays(gains, context):
            self._drafting = self.ngram
            self.other.follow(context)
            return self.ngram.propose(context)
        self._drafting = self.other
        start = perf_counter()
        draft = self.other.propose(context)
        self._drafted_in = perf_counter() - start
        return draft

    def observe(self, draft: DraftTree, verdict: Verdict, accepted: Sequence[int]) -> None:
        self._drafting.observe(draft, verdict, accepted)
        pacer = self._pacer
        if self._drafting is self.ngram or pacer is None or not pacer.measured:
            return
        size, B = draft.tokens.shape[1], len(accepted)
        verifying = pacer.verify(size * B) if size > 1 else pacer.verify.plain
        self._seconds = self.FORGET * self._seconds + self._drafted_in + verifying
        self._tokens = self.FORGET * self._tokens + sum(accepted[b] + 1 for b in self._rows)

    def _lookup_pays(self, gains: Sequence[float], context: Context) -> bool:
        """gains: per depth, how many of the rows' looked-up tokens are expected to be accepted."""
        pacer, B = context.pacer, context.batch_size
        if not pacer.measured or not self._tokens:
            return False  # the other's drafts first: theirs is the price to beat
        length = pacer.best_length(gains, B)
        expected = len(self._rows) + sum(gains[:length])
        return length > 0 and expected * self._seconds > self._tokens * pacer.verify((1 + length) * B)
