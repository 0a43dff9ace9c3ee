"""`HybridProposer`: n-grams where the text repeats itself, a model's drafts elsewhere.

Owns the choice between the two, once per round. SuffixDecoding's hybrid (arXiv 2411.04975) makes it by a threshold on
the n-grams' score; here it is made by expected tokens per second.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from torch import nn
from transformers import PreTrainedModel

from specdec.models.hidden_states import Taps
from specdec.proposers.base import Context, Proposer
from specdec.proposers.lookup.base import Lookup
from specdec.proposers.lookup.ngram import NgramProposer
from specdec.proposers.pacing.estimates import Estimates, PassCost
from specdec.proposers.pacing.pacer import Pacer
from specdec.sampling.draft_tree import DraftTree
from specdec.sampling.results import Verdict

IN_A_ROW = 8  # rounds of n-grams; then, unless they are far ahead, the other shows anew what it brings
FAR_AHEAD = 2.0  # times the other's tokens per second


@dataclass
class ProposerStats:
    """The other proposer's rounds in calls of one kind: moving averages per row.

    Attributes:
        estimates: its own, whose price of a token is that of these rounds. count: how many. tokens: gained by each row.
        seconds: of its draft and the target's pass.
    """

    estimates: Estimates
    count: int = 0
    tokens: float = 0.0
    seconds: float = 0.0

    def observe(self, tokens: float, seconds: float) -> None:
        if self.count:
            seconds = min(seconds, PassCost.OUTLIER * self.seconds)
        self.count += 1
        step = max(1 / self.count, 0.1)
        self.tokens += step * (tokens - self.tokens)
        self.seconds += step * (seconds - self.seconds)

    @property
    def rate(self) -> float:
        """Tokens per row and second."""
        return self.tokens / self.seconds


class HybridProposer(Proposer):
    """Lets the n-grams draft where they promise more tokens per second than the other proposer's recent rounds brought.

    Who drafts depends on the text so far and on costs, never on what is drawn: the output stays the target's.

    Args:
        other: an EAGLE-3 head, a draft model, or a proposer of your own (see `Proposer.sync`).
        ngram: looks the text up: `NgramProposer()` by default, or a `SuffixProposer`.
    """

    def __init__(self, other: Proposer, ngram: Lookup | None = None):
        if not isinstance(other, Proposer):
            raise TypeError(
                f"HybridProposer takes a Proposer, DraftModelProposer(model) say, got a {type(other).__name__}"
            )
        self.other = other
        self.ngram: Lookup = NgramProposer() if ngram is None else ngram
        self._rounds: WeakKeyDictionary[Estimates, ProposerStats] = (
            WeakKeyDictionary()
        )  # by what calls of a kind learnt
        self._looking_up = False  # in this round

    def taps(self, target: PreTrainedModel) -> Taps | None:
        return self.other.taps(target)

    def check(self, target: PreTrainedModel) -> None:
        self.other.check(target)
        self.ngram.check(target)

    def drafting_model(self) -> nn.Module | None:
        return self.other.drafting_model()

    def capture(self, compiled: bool) -> None:
        self.other.capture(compiled)

    def begin(self, context: Context) -> None:
        self.other, self.ngram = copy(self.other), copy(self.ngram)
        self.other.begin(context)
        self.ngram.begin(context)
        self._pacer: Pacer | None = None  # of the other
        self._context: Context | None = None  # this round's
        self._reads_prompt = True  # in its next draft
        self._in_a_row = 0  # rounds that the other sat out

    def propose(self, context: Context) -> DraftTree:
        rounds = self._stats_of(context.pacer)
        gains = self.ngram.expect(context)
        self._context, self._looking_up = context, self._lookup_pays(gains, rounds, context)
        if self._looking_up:
            self._in_a_row += 1
            self.sync(context)
            return self.ngram.draft(context, gains)
        self._in_a_row = 0
        return self.other.propose(replace(context, pacer=self._pacer_of(context)))

    def _stats_of(self, pacer: Pacer) -> ProposerStats:
        return self._rounds.setdefault(pacer.estimates, ProposerStats(pacer.estimates.apart()))

    def _pacer_of(self, context: Context) -> Pacer:
        """The other's, in this call."""
        if self._pacer is None:
            self._pacer = context.pacer.apart(self._stats_of(context.pacer).estimates)
        return self._pacer

    @property
    def drafted_by(self) -> str:
        return (self.ngram if self._looking_up else self.other).drafted_by

    def sync(self, context: Context) -> None:
        self.other.sync(context)

    def observe(self, draft: DraftTree, verdict: Verdict, accepted: Sequence[int]) -> None:
        context = self._context
        if self._looking_up or context is None:
            self.ngram.observe(draft, verdict, accepted)
            return
        self.other.observe(draft, verdict, accepted)
        if draft.size > 1 and self._reads_prompt:
            self._reads_prompt = False  # which is not what a round costs
        else:
            self._book(self._stats_of(context.pacer), context, draft.size, accepted)

    def _book(self, rounds: ProposerStats, context: Context, size: int, accepted: Sequence[int]) -> None:
        """A round of the other's, with a draft of `size` nodes."""
        rows, verify = context.rows, context.pacer.verify
        if rows and verify.known:
            seconds = context.pacer.drafting + verify(size)
            new_tokens = len(rows) + sum(accepted[b] for b in rows)
            rounds.estimates.observe_pace(seconds, new_tokens)
            rounds.observe(new_tokens / len(rows), seconds)

    def _lookup_pays(self, gains: Sequence[float], rounds: ProposerStats, context: Context) -> bool:
        """gains: per depth, how many of the rows' looked-up tokens are expected to be accepted."""
        rows, verify = context.rows, context.pacer.verify
        length = context.pacer.best_length(gains, context.batch_size)
        if length == 0 or not verify.known:
            return False
        left, pacer = max(context.budget), self._pacer_of(context)
        rate = rounds.rate if rounds.count else pacer.promise()
        if self._reads_prompt:  # seconds that the rest of the text has to pay for
            reading = sum(context.ends) * pacer.seconds_to_read
            rate = left / (left / rate + reading)
        promised = (1 + sum(gains[:length]) / len(rows)) / verify(1 + length)
        return promised > rate * (FAR_AHEAD if self._in_a_row >= IN_A_ROW and not self._reads_prompt else 1.0)
