"""What of a draft is expected to be accepted: how sure its model is of a token tells how often such tokens are.

Owns the bins of this sureness, and what the nodes of dynamic trees have gained in a call. Where a device's results are
not to be waited for, the rounds before say what this one is expected to bring.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from torch import Tensor

from specdec.proposers.base import Context
from specdec.proposers.pacing.pacer import Pacer
from specdec.sampling.dynamic_tree import Candidates, Ranking
from specdec.sampling.results import Outcome

CONFIDENCES = 20  # bins of a probability of the draft's
RECENT = 0.3  # weight of the last tree's gains among those before


def bin_of(chances: Tensor) -> Tensor:
    """(B,) int64 bins of chances (B,): 1 to CONFIDENCES."""
    return 1 + (chances.nan_to_num(0.0) * (CONFIDENCES - 1e-3)).long()


def sureness(scores: Tensor, q: Tensor | None) -> Tensor:
    """(B,) int64, how sure a draft is of its next token, in bins: by its top probability.

    Args:
        scores: (B, V). q: (B, V), of them; None: the token is not drawn.
    """
    return bin_of(q.amax(-1) if q is not None else (scores.amax(-1) - scores.logsumexp(-1)).exp())


def chances(context: Context, rate: float) -> list[float]:
    """`rate` for each row worth drafting for, 0 for the others: they take part in the passes for nothing."""
    return [
        rate if active and budget > 0 else 0.0 for active, budget in zip(context.active, context.budget, strict=True)
    ]


def along_chain(context: Context, before: Sequence[float], confidence_bins: Tensor, drafted: int) -> list[float]:
    """Per row, the chance that a chain's next token and all before it are accepted.

    Args:
        before: per row, that of the tokens before it. confidence_bins: (B,) int64, how sure the draft is of this one.
    """
    acceptance, rows = context.pacer.acceptance, context.rows
    if context.host_sync_is_free:
        rates = [acceptance.rate(key, prior=key / CONFIDENCES) for key in confidence_bins.tolist()]
        context.pacer.observe_expectation(sum(rates[b] for b in rows) / len(rows))
    else:  # the round will tell
        rates = [context.pacer.expected_rate] * context.batch_size
    return [
        chance * rate if budget > drafted else 0.0
        for chance, rate, budget in zip(before, rates, context.budget, strict=True)
    ]


def below(context: Context, candidates: Candidates, depth: int) -> list[float]:
    """Per row, the chance that one more depth of a tree has an accepted node."""
    rate = context.pacer.expected_rate
    looks = context.host_sync_is_free
    reached = candidates.level_mass().tolist() if looks else [rate**depth] * context.batch_size
    return [
        rate * min(1.0, mass) if active and budget > depth else 0.0
        for mass, active, budget in zip(reached, context.active, context.budget, strict=True)
    ]


def record_chain(pacer: Pacer, confidence_bins: Sequence[Sequence[int]], size: int, rows: Sequence[int]) -> None:
    """Of a chain of `size` nodes that was not looked at while it grew; confidence_bins: per row, node by node."""
    for depth in range(1, size):
        rates = [
            pacer.acceptance.rate(confidence_bins[b][depth], prior=confidence_bins[b][depth] / CONFIDENCES)
            for b in rows
        ]
        pacer.observe_expectation(sum(rates) / len(rates))


def book_tree(pacer: Pacer, outcome: Outcome, accepted: Sequence[int], rows: Sequence[int]) -> None:
    """Which nodes of a dynamic tree were accepted, of those as sure as they, and how deep it went."""
    for b in rows:
        on_path = set(outcome.path[b][: accepted[b] + 1])
        known = [1.0, *outcome.notes["chances"][b]]  # of the draft's nodes, and of those that came behind
        for node, (parent, chance) in enumerate(zip(outcome.parents[b], known, strict=False)):
            if parent >= 0:
                pacer.acceptance.observe(_bin(chance), node in on_path, prior=chance)
        for depth in range(min(accepted[b] + 1, outcome.deepest[b])):
            pacer.observe_expectation(float(depth < accepted[b]))


class TreeGains:
    """What the nodes of a call's dynamic trees are expected to gain, the most probable first."""

    def __init__(self) -> None:
        self._recent: list[float] | None = None  # of the last trees, where none is looked at before it is verified

    def size(self, context: Context, count: int, best: Ranking | None = None) -> int:
        """How many of so many candidates are worth verifying; best: they, where they can be looked at."""
        pacer = context.pacer
        gains = self._of(context, count, best)
        size = pacer.best_length(gains, context.batch_size)
        if size == 0 and gains:  # drafts that are not made cannot show their acceptance
            pacer.observe_expectation(gains[0] / max(1, len(context.rows)))
        return size

    def observe(self, pacer: Pacer, known: Sequence[Sequence[float]], rows: Sequence[int]) -> None:
        """The chances of the last tree's nodes, in each row."""
        gains = _summed(known, pacer, rows)
        pairs = zip_longest(self._recent or gains, gains, fillvalue=0.0)
        self._recent = [old + RECENT * (new - old) for old, new in pairs]

    def _of(self, context: Context, count: int, best: Ranking | None) -> list[float]:
        """Per rank among the candidates, how many of the rows' nodes are expected to be accepted."""
        if context.host_sync_is_free and best is not None:
            return _summed(best.probabilities().tolist(), context.pacer, context.rows)
        if self._recent is None:  # as in a chain
            return [len(context.rows) * context.pacer.expected_rate ** (1 + rank) for rank in range(count)]
        return self._recent[:count]


def _summed(known: Sequence[Sequence[float]], pacer: Pacer, rows: Sequence[int]) -> list[float]:
    """Per rank, what the rows' candidates with these chances gain together; a row's most probable come first."""
    gains = [0.0] * len(known[0])
    for b in rows:
        for rank, probability in enumerate(known[b]):
            if probability > 0:
                gains[rank] += pacer.acceptance.rate(_bin(probability), prior=probability)
    return sorted(gains, reverse=True)


def _bin(probability: float) -> int:
    """1 to CONFIDENCES; 1 also where a processor's +inf left no probability to speak of."""
    if probability != probability:
        return 1
    return 1 + int(probability * (CONFIDENCES - 1e-3))
