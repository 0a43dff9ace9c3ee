"""`Diagnosis`: what was measured of the ways to answer some prompts, and what follows from it, in words.

Owns the words. Every figure in them was measured, or is one measured sum less another; the ways are ranked by their
seconds alone, one of them is advised, and one limit is named, so that no sentence can contradict another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.engine.report import Report
from specdec.utils.moved import renamed_method

NEAR = 1.03  # times the fastest's seconds: as fast as that, for the clock
MISSING = 0.05  # of the target's tokens: more of them outside of the draft's vocabulary are a fault
UNUSUAL = 0.1  # less acceptance than on usual prompts is the prompts' doing
WORTH = 0.01  # of a way's seconds: what would spare less of them is no limit


@dataclass(frozen=True)
class Measured:
    """A way to answer, as it went.

    Attributes:
        name: in words. code: what gives it. tokens: written, over all prompts.
        seconds: of the whole calls, prefill included. first: until a call's first token, in the mean.
        report: of the calls; empty for plain decoding.
    """

    name: str
    code: str
    tokens: int
    seconds: float
    first: float
    report: Report = field(default_factory=Report)

    @property
    def pace(self) -> float:
        """Seconds per token."""
        return self.seconds / self.tokens

    def row(self, plain: Measured) -> list[str]:
        """Of the table: name, seconds, speed-up; what was drafted in a round, what it brought and what it took."""
        found = [self.name, f"{1e3 * self.first:.0f}", f"{1e3 * self.pace:.1f}", f"{plain.pace / self.pace:.2f}x"]
        rounds = self.report.num_row_rounds
        if not rounds:
            return [*found, "-", "-", "-", "-"]
        drafting, verifying = (1e3 * self.report.seconds[phase] / rounds for phase in ("draft", "verify"))
        drafted, brought = self.report.num_draft_tokens / rounds, self.report.tokens_per_round
        return [*found, f"{drafted:.1f}", f"{brought:.2f}", f"{drafting:.1f}", f"{verifying:.1f}"]


COLUMNS = ["", "ms to the first", "ms a token", "speed-up"]
COLUMNS += ["drafted", "tokens a round", "ms drafting", "ms target pass"]


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines whose columns are aligned, the first on the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]


@dataclass(frozen=True)
class Limit:
    """A way's seconds if one thing were as good as it can be: never more than they are."""

    seconds: float
    means: str
    cure: str


@dataclass(frozen=True)
class Diagnosis:
    """What was measured.

    Attributes:
        plain: `model.generate()`. drafting: the ways with drafts, the proposer as it comes first.
        step: seconds of plain decoding's pass over a single token.
        acceptance: of chains, conditional, per position.
        uncovered: share of the target's tokens that the draft's vocabulary lacks.
        elsewhere: acceptance at the first position on prompts of ours, None if not measured.
        has_head: an EAGLE head drafts. uses_lookup: n-grams take part.
        answered: prompts that every way answered. stopped: before all was measured.
    """

    plain: Measured
    drafting: tuple[Measured, ...]
    step: float
    acceptance: tuple[float, ...] = ()
    uncovered: float = 0.0
    elsewhere: float | None = None
    has_head: bool = False
    uses_lookup: bool = False
    answered: int = 0
    stopped: bool = False

    @property
    def best(self) -> Measured:
        """The first that is about as fast as the fastest: plain decoding, the proposer as it comes, the others."""
        methods = [self.plain, *self.drafting]
        fastest = min(method.pace for method in methods)
        return next(method for method in methods if method.pace <= NEAR * fastest)

    @property
    def best_draft(self) -> Measured:
        """The fastest with drafts."""
        return min(self.drafting, key=lambda method: method.pace)

    def limits(self) -> list[Limit]:
        """Of the fastest with drafts, what would help it most first."""
        method = self.best_draft
        report, rounds = method.report, method.report.num_row_rounds
        longest = 1 + sum(report.num_draft_tokens_per_pos) / rounds  # tokens a round, were every draft accepted
        wider = max(0.0, report.seconds["verify"] - rounds * self.step)
        spared = {
            "were all its drafts accepted": (
                report.round_seconds * (1 - report.tokens_per_round / longest),
                self._acceptance,
            ),
            "were drafting free": (report.seconds["draft"], self._drafting),
            "were its passes as quick as plain decoding's": (wider, self._passes),
        }
        found = [Limit(method.seconds - saved, means, cure) for means, (saved, cure) in spared.items()]
        return sorted(found, key=lambda limit: limit.seconds)

    def summary(self) -> str:
        """The ways beside each other, which to take, and what limits the fastest of the drafts."""
        rows = [COLUMNS, *(method.row(self.plain) for method in (self.plain, *self.drafting))]
        return "\n".join([*table(rows), "", self._advice(), *self._facts(), *self._format_limits()])

    in_words = renamed_method("Diagnosis.in_words", "summary")

    def _advice(self) -> str:
        best, others = self.best, [method for method in (self.plain, *self.drafting) if method is not self.best]
        if best is self.plain:
            return f"take: plain decoding, {best.code}: no draft was more than {100 * (NEAR - 1):.0f}% faster"
        rank = "the fastest" if all(best.pace <= other.pace for other in others) else "about as fast as the fastest"
        return f"take: {best.name}, {best.code}: {rank}"

    def _facts(self) -> list[str]:
        found = []
        if self.acceptance:
            found.append("accepted, of chains, by position: " + " ".join(f"{rate:.2f}" for rate in self.acceptance))
        if self._unusual and self.elsewhere is not None:
            found.append(f"accepted at the first position on prompts of ours: {self.elsewhere:.2f}")
        if self.uncovered > MISSING:
            found.append(f"of what the target wrote, {100 * self.uncovered:.0f}% is not in the draft's vocabulary")
        return found

    def _format_limits(self) -> list[str]:
        method = self.best_draft
        if not method.report.num_drafts:
            return [f"{method.name} drafted nothing on these prompts."]
        limits = [limit for limit in self.limits() if limit.seconds < (1 - WORTH) * method.seconds]
        if not limits:
            return ["", f"Neither its drafts nor its passes hold {method.name} back."]
        listed = [f"  {limit.means}: {self._speed_up(limit.seconds, method):.2f}x" for limit in limits]
        most = limits[0]
        if self._speed_up(most.seconds, method) < 1:
            last = "No one of these would make drafting pay here."
        else:
            last = f"The first limits most. {most.cure}"
        return [
            "",
            f"{method.name}, {self._speed_up(method.seconds, method):.2f}x, would be at the very best",
            *listed,
            last,
        ]

    def _speed_up(self, seconds: float, method: Measured) -> float:
        return self.plain.pace * method.tokens / seconds

    @property
    def _unusual(self) -> bool:
        return self.elsewhere is not None and bool(self.acceptance) and self.elsewhere > self.acceptance[0] + UNUSUAL

    @property
    def _acceptance(self) -> str:
        by_a_model = self.best_draft.report.num_draft_passes > 0
        if by_a_model and self.uncovered > MISSING:
            return (
                "Each token outside of the draft's vocabulary ends a draft: choose a larger one, from text like yours."
            )
        if by_a_model and self._unusual:
            return "Your prompts are unlike what the draft knows, or they miss the chat template."
        beside = "" if self.uses_lookup else ', or n-grams beside either ("ngram+eagle3", "ngram+draft:PATH")'
        return f"More is accepted from an EAGLE-3 head trained on text like yours, or a larger draft model{beside}."

    @property
    def _drafting(self) -> str:
        if self.has_head:
            return "Quicker: a head with a smaller --draft-vocab or --intermediate-size."
        return "Quicker: a smaller draft model, an EAGLE-3 head, or vocab= to trim the draft model's."

    @property
    def _passes(self) -> str:
        verify = self.best_draft.report
        ratio = verify.seconds["verify"] / verify.num_row_rounds / self.step
        return (
            f"One of its passes takes {ratio:.2f} of plain decoding's: another number format (--dtype) may be quicker."
        )
