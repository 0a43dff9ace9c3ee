"""`Counts`: counters, rates and times of speculative decoding. `Report` formats and exports them.

Names and formulas follow vLLM (v1/spec_decode/metrics.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

LATENCIES = 100_000  # kept for means and percentiles: 3 MB
PHASES = ("prefill", "draft", "verify", "accept", "other")
Self = TypeVar("Self", bound="Counts")


@dataclass(repr=False)
class Counts:
    """Counters of one or more `generate()` calls. Rates are pooled over all steps of all rows, not averaged.

    A *row-round* is one round of one row: a round of B active rows is B row-rounds.

    Attributes:
        num_calls: `generate()` calls.
        num_failed_calls: calls that raised; only their rounds are counted.
        num_plain_calls: calls that ran as plain decoding.
        plain_reasons: number of plain calls by reason.
        num_exact_calls: calls whose drafted tokens were computed bit for bit as in plain decoding (`exact=True`).
        num_rows: sequences generated.
        num_output_tokens: new tokens returned, without padding.
        num_rounds: target passes after the prefill.
        num_row_rounds: rounds summed over rows.
        num_drafts: row-rounds with at least one drafted token.
        num_draft_tokens: drafted nodes.
        num_accepted_tokens: drafted tokens that were accepted.
        num_accepted_tokens_per_pos: entry i counts the drafts whose (i+1)-th token was accepted.
        num_draft_tokens_per_pos: entry i counts the drafts with a node at depth i+1.
        num_drafts_by: `num_drafts` by proposer.
        num_accepted_tokens_by: `num_accepted_tokens` by proposer.
        seconds: wall time by phase: prefill, draft, verify, accept, other.
        num_draft_passes: forward passes of a draft model or head.
        draft_pass_seconds: their part of the draft phase; the rest was spent on building drafts from their output.
        total_seconds: wall time of whole calls.
        estimated_plain_seconds: estimate of plain decoding's seconds for the same tokens after the first.
        compared_seconds: wall time of the rounds that this estimate replaces.
        latencies: seconds of a round per token that it gave a row, one entry per token, the last 100,000.
        times_to_first_token: seconds, one entry per call, the last 100,000.
    """

    num_calls: int = 0
    num_failed_calls: int = 0
    num_plain_calls: int = 0
    plain_reasons: dict[str, int] = field(default_factory=dict)
    num_exact_calls: int = 0
    num_rows: int = 0
    num_output_tokens: int = 0
    num_rounds: int = 0
    num_row_rounds: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    num_draft_tokens_per_pos: list[int] = field(default_factory=list)
    num_drafts_by: dict[str, int] = field(default_factory=dict)
    num_accepted_tokens_by: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    num_draft_passes: int = 0
    draft_pass_seconds: float = 0.0
    total_seconds: float = 0.0
    estimated_plain_seconds: float = 0.0
    compared_seconds: float = 0.0
    latencies: deque[float] = field(default_factory=lambda: deque(maxlen=LATENCIES))
    times_to_first_token: deque[float] = field(default_factory=lambda: deque(maxlen=LATENCIES))

    @contextmanager
    def part(self: Self) -> Iterator[Self]:
        """Count one decoding loop of a call in a report of its own, and add that report to this one at the end.

        Whisper's `generate()` runs one loop per audio segment. The call still has a single time to the first token and
        counts as plain at most once.

        Yields:
            The report of this loop.
        """
        part = type(self)()
        try:
            yield part
        finally:
            if self.times_to_first_token:
                part.times_to_first_token.clear()
            self.add(part)
            self.num_plain_calls = min(1, self.num_plain_calls)
            self.plain_reasons = dict.fromkeys(self.plain_reasons, 1)

    def record_plain(self, reason: str) -> None:
        """Count a call that runs as plain decoding, under this reason."""
        self.num_plain_calls += 1
        _add(self.plain_reasons, {reason: 1})

    def record_round(
        self, drafted: list[int], depths: list[int], accepted: list[int], seconds: float, drafted_by: str = ""
    ) -> None:
        """Count one round.

        Args:
            drafted: number of drafted nodes of each active row.
            depths: depth of the deepest node of each active row.
            accepted: number of accepted draft tokens of each active row.
            seconds: wall time of the round.
            drafted_by: name of the proposer.
        """
        self.num_rounds += 1
        _add(self.num_drafts_by, {drafted_by: sum(nodes > 0 for nodes in drafted)})
        _add(self.num_accepted_tokens_by, {drafted_by: sum(accepted)})
        self.num_row_rounds += len(drafted)
        for nodes, depth, taken in zip(drafted, depths, accepted, strict=True):
            self.num_drafts += nodes > 0
            self.num_draft_tokens += nodes
            self.num_accepted_tokens += taken
            _count(self.num_draft_tokens_per_pos, depth)
            _count(self.num_accepted_tokens_per_pos, depth, by=0)
            _count(self.num_accepted_tokens_per_pos, taken)
            self.latencies += [seconds / (taken + 1)] * (taken + 1)

    def estimate_plain(self, seconds: float) -> None:
        """Set the estimate of plain decoding's seconds for the tokens after the first. Call it once all rounds ended.

        seconds: number of target passes that plain decoding needs, times the duration of one over a single token.
        """
        self.estimated_plain_seconds, self.compared_seconds = seconds, self.round_seconds

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted tokens / drafted tokens; NaN before any draft, and if calls returned no new tokens.

        Of a tree at most one node per depth is accepted.
        """
        empty = self.num_rows > 0 and not self.num_output_tokens
        return float("nan") if empty else _ratio(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted tokens / drafts: tokens per row-round with a draft, with the bonus or recovered token.

        This is EAGLE's tau (arXiv 2401.15077) and vLLM's mean acceptance length.
        """
        return 1 + _ratio(self.num_accepted_tokens, self.num_drafts)

    @property
    def tokens_per_round(self) -> float:
        """Tokens per row and target pass, rounds without a draft included."""
        return 1 + _ratio(self.num_accepted_tokens, self.num_row_rounds)

    @property
    def acceptance_rate_per_pos(self) -> list[float]:
        """Entry i: share of all drafts whose (i+1)-th token was accepted (vLLM's per-position rate)."""
        return [_ratio(count, self.num_drafts) for count in self.num_accepted_tokens_per_pos]

    @property
    def conditional_acceptance_rate_per_pos(self) -> list[float]:
        """Entry i: share accepted at position i+1 of the drafts that reach it (drafted, and all before accepted)."""
        reached = [self.num_drafts, *self.num_accepted_tokens_per_pos]
        return [
            _ratio(accepted, min(before, drafted))
            for accepted, before, drafted in zip(
                self.num_accepted_tokens_per_pos, reached, self.num_draft_tokens_per_pos, strict=False
            )
        ]

    @property
    def time_to_first_token(self) -> float:
        """Mean seconds from the call to its first new token."""
        return _ratio(sum(self.times_to_first_token), len(self.times_to_first_token))

    @property
    def time_per_output_token(self) -> float:
        """Mean seconds per token and row after the first."""
        return _ratio(sum(self.latencies), len(self.latencies))

    @property
    def time_per_output_token_p50(self) -> float:
        """Median of `latencies`."""
        return _quantile(self.latencies, 0.50)

    @property
    def time_per_output_token_p99(self) -> float:
        """99th percentile of `latencies`."""
        return _quantile(self.latencies, 0.99)

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows per second of wall time, prefill included."""
        return _ratio(self.num_output_tokens, self.total_seconds)

    @property
    def estimated_speed_up(self) -> float:
        """Estimated seconds of plain decoding / seconds of the rounds; NaN if no call could estimate the former.

        A call estimates them from its passes without a draft, or from those of earlier calls. The prefill is left out.
        """
        return _ratio(self.estimated_plain_seconds, self.compared_seconds)

    @property
    def seconds_per_draft_pass(self) -> float:
        """Mean seconds per draft pass; NaN for proposers that run no model."""
        return _ratio(self.draft_pass_seconds, self.num_draft_passes)

    @property
    def round_seconds(self) -> float:
        """Wall time of all rounds: all phases except the prefill."""
        return sum(self.seconds[phase] for phase in PHASES[1:])

    @property
    def building_share(self) -> float:
        """Share of the rounds' time spent on building drafts (draft passes excluded) and accepting them."""
        building = self.seconds["draft"] - self.draft_pass_seconds + self.seconds["accept"]
        return _ratio(building, self.round_seconds)

    @property
    def overhead(self) -> float:
        """Share of the rounds' time spent on neither the target pass nor drafting."""
        return _ratio(self.seconds["accept"] + self.seconds["other"], self.round_seconds)

    def add(self, other: Counts) -> None:
        """Add another report's counts to this one."""
        for name in (one.name for one in fields(self)):
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(mine, dict):
                _add(mine, theirs)
            elif isinstance(mine, deque):
                mine += theirs
            elif isinstance(mine, list):
                mine += [0] * (len(theirs) - len(mine))
                mine[: len(theirs)] = [a + b for a, b in zip(mine, theirs, strict=False)]
            else:
                setattr(self, name, mine + theirs)

    def reset(self) -> None:
        """Set all counters to zero."""
        self.__init__()  # type: ignore[misc]


def _count(counts: list[int], length: int, by: int = 1) -> None:
    """Add `by` to the first `length` entries."""
    counts += [0] * (length - len(counts))
    for i in range(length):
        counts[i] += by


def _add(counts: dict[str, Any], more: Mapping[str, float]) -> None:
    for name, count in more.items():
        counts[name] = counts.get(name, 0) + count


def _ratio(a: float, b: float) -> float:
    return a / b if b else float("nan")


def _quantile(values: Iterable[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else float("nan")
