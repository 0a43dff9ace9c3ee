"""Estimates of a draft's acceptance from the draft model's confidence, in bins.

On a device, where reading the confidence would need a host sync, the estimates come from the rounds before.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from torch import Tensor

from specdec.proposers.context import Context
from specdec.proposers.pacing.pacer import Pacer
from specdec.sampling.dynamic_tree import Candidates, Ranking
from specdec.sampling.results import HostResult

CONFIDENCES = 20  # bins of the draft's probability
RECENT = 0.3  # weight of the last tree in the moving average


def bin_of(chances: Tensor) -> Tensor:
    """Bins int64 of probabilities, in their shape: 1 to CONFIDENCES."""
    return 1 + (chances.nan_to_num(0.0) * (CONFIDENCES - 1e-3)).long()


def confidence(scores: Tensor, q: Tensor | None) -> Tensor:
    """The draft's confidence (B,) float32 in its next token: its top probability.

    Args:
        scores: (B, K) float32, log q up to a constant.
        q: (B, K) float32, the softmax of `scores`; None: computed.
    """
    return (scores.softmax(-1) if q is None else q).amax(-1)


def chances(context: Context, rate: float) -> list[float]:
    """`rate` for each row to draft for, 0 for the others, whose nodes in the passes are never accepted."""
    return [
        rate if active and budget > 0 else 0.0 for active, budget in zip(context.active, context.budget, strict=True)
    ]


def along_chain(context: Context, before: Sequence[float], confidence: Tensor, drafted: int) -> list[float]:
    """The probability of each row that a chain's next token and all before it are accepted.

    Args:
        context: the state of the batch.
        before: the probability of each row that all tokens before it are accepted.
        confidence: (B,) float32, the confidence in the next token.
        drafted: the number of tokens before it.
    """
    acceptance, rows = context.pacer.acceptance, context.rows
    if context.host_sync_is_free:
        rates = [acceptance.rate(key, prior=key / CONFIDENCES) for key in bin_of(confidence).tolist()]
        context.pacer.observe_expectation(sum(rates[b] for b in rows) / len(rows))
    else:  # recorded after the round, see `record_chain`
        rates = [context.pacer.expected_rate] * context.batch_size
    return [
        chance * rate if budget > drafted else 0.0
        for chance, rate, budget in zip(before, rates, context.budget, strict=True)
    ]


def below(context: Context, candidates: Candidates, depth: int) -> list[float]:
    """The probability of each row that one more depth of a tree has an accepted node."""
    rate = context.pacer.expected_rate
    may_read = context.host_sync_is_free
    reached = candidates.level_mass().tolist() if may_read else [rate**depth] * context.batch_size
    return [
        rate * min(1.0, mass) if active and budget > depth else 0.0
        for mass, active, budget in zip(reached, context.active, context.budget, strict=True)
    ]


def record_chain(pacer: Pacer, confidence_bins: Sequence[Sequence[int]], size: int, rows: Sequence[int]) -> None:
    """Record the confidence of a chain of `size` nodes drafted on a device. confidence_bins: of each row's nodes."""
    for depth in range(1, size):
        rates = [
            pacer.acceptance.rate(confidence_bins[b][depth], prior=confidence_bins[b][depth] / CONFIDENCES)
            for b in rows
        ]
        pacer.observe_expectation(sum(rates) / len(rates))


def book_tree(pacer: Pacer, result: HostResult, accepted: Sequence[int], rows: Sequence[int]) -> None:
    """Record which nodes of a dynamic tree were accepted, by confidence bin, and how deep the accepted path goes."""
    for b in rows:
        on_path = set(result.path[b][: accepted[b] + 1])
        known = [1.0, *result.notes["chances"][b]]  # of the draft's nodes, then of candidates that were left out
        for node, (parent, chance) in enumerate(zip(result.parents[b], known, strict=False)):
            if parent >= 0:
                pacer.acceptance.observe(_bin(chance), node in on_path, prior=chance)
        for depth in range(min(accepted[b] + 1, result.deepest[b])):
            pacer.observe_expectation(float(depth < accepted[b]))


class TreeGains:
    """Expected accepted tokens of the nodes of a call's dynamic trees, the most probable node first."""

    def __init__(self) -> None:
        self._recent: list[float] | None = None  # moving average over past trees, for use without a host sync

    def size(self, context: Context, count: int, best: Ranking | None = None) -> int:
        """The number of candidates worth verifying, out of `count`. best: the candidates, if they may be read."""
        pacer = context.pacer
        gains = self._of(context, count, best)
        size = pacer.best_length(gains, context.batch_size)
        if size == 0 and gains:  # without a draft there will be no acceptance to observe
            pacer.observe_expectation(gains[0] / max(1, len(context.rows)))
        return size

    def observe(self, pacer: Pacer, known: Sequence[Sequence[float]], rows: Sequence[int]) -> None:
        """Record the last tree. known: the probabilities of each row's nodes."""
        gains = _summed(known, pacer, rows)
        pairs = zip_longest(self._recent or gains, gains, fillvalue=0.0)
        self._recent = [old + RECENT * (new - old) for old, new in pairs]

    def _of(self, context: Context, count: int, best: Ranking | None) -> list[float]:
        """Expected accepted nodes over all rows, for each rank among the candidates."""
        if context.host_sync_is_free and best is not None:
            return _summed(best.probabilities().tolist(), context.pacer, context.rows)
        if self._recent is None:  # no tree yet: the ranks are treated as the depths of a chain
            return [len(context.rows) * context.pacer.expected_rate ** (1 + rank) for rank in range(count)]
        return self._recent[:count]


def _summed(known: Sequence[Sequence[float]], pacer: Pacer, rows: Sequence[int]) -> list[float]:
    """Expected accepted candidates over all rows, for each rank. known: each row's probabilities, highest first."""
    gains = [0.0] * len(known[0])
    for b in rows:
        for rank, probability in enumerate(known[b]):
            if probability > 0:
                gains[rank] += pacer.acceptance.rate(_bin(probability), prior=probability)
    return sorted(gains, reverse=True)


def _bin(probability: float) -> int:
    """The bin of a probability, 1 to CONFIDENCES; 1 for NaN, which a processor's +inf leads to."""
    if probability != probability:
        return 1
    return 1 + int(probability * (CONFIDENCES - 1e-3))
