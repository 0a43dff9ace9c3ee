"""`HybridProposer`: n-grams where the text repeats itself, a model's drafts elsewhere.

The choice is made once per round. SuffixDecoding's hybrid (arXiv 2411.04975) compares the score of the n-grams with a
threshold. Here the expected tokens per second are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from torch import nn
from transformers import PreTrainedModel

from specdec.models.hidden_states import Taps
from specdec.proposers.base import Proposer
from specdec.proposers.context import Context
from specdec.proposers.draft_state import DraftState
from specdec.proposers.lookup.base import Lookup
from specdec.proposers.lookup.grammar import GrammarLookup
from specdec.proposers.lookup.ngram import NgramProposer
from specdec.proposers.pacing.estimates import Estimates
from specdec.proposers.pacing.pacer import OUTLIER, Pacer
from specdec.sampling.draft_tree import DraftTree
from specdec.sampling.results import NewTokens, RoundResult

AGAIN = 0.9  # share from which drafts are launched ahead: a dropped one costs some ten times what a right guess saves


@dataclass
class ProposerStats:
    """Moving averages over the rounds that the other proposer drafted, in calls of one kind.

    Attributes:
        estimates: the estimates of these rounds, with their own pace.
        count: the number of rounds.
        tokens: new tokens per row and round.
        cost: cost per round, of the draft and the target's pass.
        again: the share of these rounds after which the other proposer drafts again.
    """

    estimates: Estimates
    count: int = 0
    tokens: float = 0.0
    cost: float = 0.0
    again: float = 0.66  # measured with a head for a 0.5B target (docs/gpu.md)

    def observe(self, tokens: float, cost: float) -> None:
        if self.count:
            cost = min(cost, OUTLIER * self.cost)
        self.count += 1
        step = max(1 / self.count, 0.1)
        self.tokens += step * (tokens - self.tokens)
        self.cost += step * (cost - self.cost)

    def observe_turn(self, again: bool) -> None:
        self.again += 0.1 * (again - self.again)

    @property
    def rate(self) -> float:
        """Tokens per row and unit of cost."""
        return self.tokens / self.cost


class HybridProposer(Proposer):
    """Drafts with n-grams or with another proposer, whichever is expected to give more tokens per second.

    The expected rate of the n-grams is compared with the rate of the other proposer's recent rounds. The choice
    depends on the text so far and on costs, never on drawn tokens, so the output distribution does not change.

    Args:
        other: the proposer for text without repetition: a head, a draft model, or your own (see `Proposer.sync`).
        ngram: the lookup proposer, an `NgramProposer` or a `SuffixProposer`. `NgramProposer()` by default.

    Raises:
        TypeError: `other` is not a `Proposer`.

    Example:
        ```python
        proposer = HybridProposer(DraftModelProposer("path/to/draft-model"))
        spec = SpeculativeGenerator(model, proposer)  # or by name: "ngram+draft:path/to/draft-model"
        ```
    """

    paces_itself = True

    def __init__(self, other: Proposer, ngram: Lookup | None = None):
        if not isinstance(other, Proposer):
            raise TypeError(
                f"HybridProposer takes a Proposer, got {type(other).__name__}; for a model: DraftModelProposer(model)"
            )
        self.other = other
        self.ngram: Lookup = NgramProposer() if ngram is None else ngram
        self._rounds: WeakKeyDictionary[Estimates, ProposerStats] = (
            WeakKeyDictionary()
        )  # by the estimates of a kind of call
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
        self._pacer: Pacer | None = None  # the other proposer's
        self._context: Context | None = None  # this round's
        self._reads_prompt = True  # the other proposer's next draft includes its prefill

    def resume_from(self, state: DraftState) -> None:
        self.other.resume_from(state)

    def draft_state(self, context: Context) -> DraftState | None:
        return self.other.draft_state(context)

    def propose(self, context: Context) -> DraftTree:
        rounds = self._stats_of(context.pacer)
        gains = self.ngram.expect(context)
        followed = None if self._looking_up else self._context
        self._context, self._looking_up = context, self._lookup_pays(gains, rounds, context)
        if followed is not None:
            rounds.observe_turn(not self._looking_up)
        if self._looking_up:
            self.sync(context)
            return self.ngram.draft(context, gains)
        return self.other.paced_draft(replace(context, pacer=self._pacer_of(context)))

    def _stats_of(self, pacer: Pacer) -> ProposerStats:
        return self._rounds.setdefault(pacer.estimates, ProposerStats(pacer.estimates.apart()))

    def _pacer_of(self, context: Context) -> Pacer:
        """The other proposer's pacer in this call."""
        if self._pacer is None:
            self._pacer = context.pacer.apart(self._stats_of(context.pacer).estimates)
        return self._pacer

    @property
    def drafted_by(self) -> str:
        return (self.ngram if self._looking_up else self.other).drafted_by

    def sync(self, context: Context) -> None:
        self.other.sync(context)

    def draft_ahead(self, context: Context, new_tokens: NewTokens) -> None:
        """Launch the other proposer's next draft if it is likely to draft again. If it does not, `sync` drops it."""
        if not self._looking_up and self._stats_of(context.pacer).again >= AGAIN:
            self.other.draft_ahead(replace(context, pacer=self._pacer_of(context)), new_tokens)

    def observe(self, draft: DraftTree, result: RoundResult, accepted: Sequence[int]) -> None:
        context = self._context
        if self._looking_up or context is None:
            self.ngram.observe(draft, result, accepted)
            return
        self.other.observe(draft, result, accepted)
        if draft.size > 1 and self._reads_prompt:
            self._reads_prompt = False  # a round with a prefill says little about later rounds
        else:
            self._book(self._stats_of(context.pacer), context, draft.size, accepted)

    def end(self, context: Context) -> None:
        self.other.end(context)
        self.ngram.end(context)

    def _book(self, rounds: ProposerStats, context: Context, size: int, accepted: Sequence[int]) -> None:
        """Record a round of the other proposer with a draft of `size` nodes."""
        rows, verify = context.rows, context.pacer.verify
        if rows and verify.known:
            cost = context.pacer.drafting + verify(size)
            new_tokens = len(rows) + sum(accepted[b] for b in rows)
            rounds.estimates.observe_pace(cost, new_tokens)
            rounds.observe(new_tokens / len(rows), cost)

    def _lookup_pays(self, gains: Sequence[float], rounds: ProposerStats, context: Context) -> bool:
        """Return whether the n-grams should draft. gains: expected accepted tokens over all rows, per depth."""
        rows, verify = context.rows, context.pacer.verify
        length = context.pacer.best_length(gains, context.batch_size)
        if length == 0 or not verify.known:
            return False
        left, pacer = max(context.budget), self._pacer_of(context)
        rate = rounds.rate if rounds.count else pacer.promise()
        if self._reads_prompt:  # the remaining tokens have to make up for the cost of the prefill
            reading = sum(context.ends) * pacer.cost_to_read
            rate = left / (left / rate + reading)
        promised = (1 + sum(gains[:length]) / len(rows)) / verify(1 + length)
        return promised > rate


def within_grammar(proposer: Proposer) -> Proposer:
    """Return a proposer that drafts with `proposer`, and what a call's grammar forces."""
    if isinstance(proposer, Lookup):
        return GrammarLookup(proposer)
    if isinstance(proposer, HybridProposer):
        both = copy(proposer)
        both.ngram = GrammarLookup(proposer.ngram)
        return both
    return HybridProposer(proposer, GrammarLookup())
