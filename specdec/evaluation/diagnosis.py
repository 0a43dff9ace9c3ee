"""`Diagnosis`: measurements of several decoding methods on some prompts, and a summary with one verdict.

Every figure in the summary was measured, or is the difference of two measured sums. `judge` gives the verdict, and one
limit is named, so that no sentence can contradict another.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec.evaluation.code import imports
from specdec.evaluation.measured import Measured, table
from specdec.evaluation.speed_up import LEVEL, MEANING
from specdec.evaluation.verdict import Verdict, judge
from specdec.utils.moved import renamed_method

MISSING = 0.05  # a larger share of target tokens outside of the draft's vocabulary is reported as a fault
UNUSUAL = 0.1  # an acceptance rate lower by more than this than on usual prompts is attributed to the prompts
WORTH = 0.01  # a limit that would save a smaller share of a method's seconds is not reported


COLUMNS = ["", "ms to first token", "ms per token", "speed-up", f"{LEVEL} interval"]
COLUMNS += ["drafted", "tokens per round", "ms drafting", "ms target pass"]


def _row(method: Measured, plain: Measured) -> list[str]:
    """Cells of a method's row in the table (see `COLUMNS`)."""
    speed_up = method.speed_up(plain)
    found = [method.name, f"{1e3 * method.first:.0f}", f"{1e3 * method.pace:.1f}", f"{speed_up.value:.2f}x"]
    found.append("-" if method is plain else speed_up.interval)
    report, rounds = method.report, method.report.num_row_rounds
    if not rounds:
        return [*found, "-", "-", "-", "-"]
    drafting, verifying = (1e3 * report.seconds[phase] / rounds for phase in ("draft", "verify"))
    drafted = report.num_draft_tokens / rounds
    return [*found, f"{drafted:.1f}", f"{report.tokens_per_round:.2f}", f"{drafting:.1f}", f"{verifying:.1f}"]


@dataclass(frozen=True)
class Limit:
    """Lower bound of a method's seconds if one cause of lost time were removed.

    Attributes:
        seconds: the bound, at most the measured seconds.
        means: the condition, as a clause.
        cure: how to get closer to it.
    """

    seconds: float
    means: str
    cure: str


@dataclass(frozen=True)
class Diagnosis:
    """Result of `diagnose`: measurements of plain decoding and of several ways to draft.

    Attributes:
        plain: `model.generate()`.
        drafting: methods with drafts; the first is the proposer with its own settings.
        step: seconds of a plain decoding pass over a single token.
        acceptance: conditional acceptance rate of chains by position.
        uncovered: share of the target's tokens that are not in the draft's vocabulary.
        elsewhere: acceptance rate at the first position on `usual` prompts; None if not measured.
        known_head: sentence on a head that is known for the target and was not measured; empty if there is none.
        loading: lines of code that load the target; empty if it was not loaded from anywhere.
        has_head: True if an EAGLE-3 head or MTP layers draft.
        uses_lookup: True if n-grams or suffixes draft, alone or in a hybrid.
        answered: number of prompts that every method answered.
        repeats: number of turns, in each of which every method answered them.
        stopped: True if interrupted before all was measured.

    Examples:
        >>> plain = Measured("plain decoding", "model.generate()", tokens=100, seconds=10.0, first=0.5)
        >>> ngram = Measured("as it comes", 'SpeculativeGenerator(model, "ngram")', 100, 5.0, 0.5)
        >>> Diagnosis(plain, (ngram,), step=0.1).best.name  # faster without a single draft is noise
        'plain decoding'
    """

    plain: Measured
    drafting: tuple[Measured, ...]
    step: float
    acceptance: tuple[float, ...] = ()
    uncovered: float = 0.0
    elsewhere: float | None = None
    known_head: str = ""
    loading: tuple[str, ...] = ()
    has_head: bool = False
    uses_lookup: bool = False
    answered: int = 0
    repeats: int = 1
    stopped: bool = False

    @property
    def verdict(self) -> Verdict:
        """The method to use, by the rule of `judge`. Its `lines()` say it."""
        return judge(self.plain, self.drafting)

    @property
    def best(self) -> Measured:
        """The recommended method; the one to use meanwhile if the measurements are too noisy to tell."""
        return self.verdict.recommended

    @property
    def best_draft(self) -> Measured:
        """The recommended method if it drafts, else the fastest one of which drafts were accepted, if there is one."""
        if self.best is not self.plain:
            return self.best
        useful = [method for method in self.drafting if method.useful]
        return max(useful or self.drafting, key=lambda method: method.speed_up(self.plain).value)

    def limits(self) -> list[Limit]:
        """Limits of the fastest method with drafts, the one with the largest saving first."""
        method = self.best_draft
        report, rounds = method.report, method.report.num_row_rounds
        longest = 1 + sum(report.num_draft_tokens_per_pos) / rounds  # tokens a round, were every draft accepted
        wider = max(0.0, report.seconds["verify"] - rounds * self.step)
        rejected = report.round_seconds * (1 - report.tokens_per_round / longest)
        saved = (
            (rejected, "if all its drafts were accepted", self._acceptance),
            (report.seconds["draft"], "if drafting were free", self._drafting),
            (wider, "if its target passes were as fast as plain decoding's", self._passes),
        )
        found = [Limit(method.seconds - seconds, means, cure) for seconds, means, cure in saved]
        return sorted(found, key=lambda limit: limit.seconds)

    def summary(self) -> str:
        """Format a table of all methods, the verdict with code, and the limits of the best method with drafts."""
        rows = [COLUMNS, *(_row(method, self.plain) for method in (self.plain, *self.drafting))]
        note = f"speed-up: {MEANING}"
        parts = [*table(rows), note, "", *self.verdict.lines(), *self._code(), *self._facts(), *self._format_limits()]
        return "\n".join(parts)

    in_words = renamed_method("Diagnosis.in_words", "summary")

    def _code(self) -> list[str]:
        if self.best is self.plain:
            return []
        code = f"spec = {self.best.code}"
        return ["", imports(code), *self.loading, code, ""]

    def _facts(self) -> list[str]:
        found = []
        if self.acceptance:
            rates = " ".join(f"{rate:.2f}" for rate in self.acceptance)
            found.append(f"acceptance rate of chains by position: {rates}")
        if self._unusual:
            found.append(f"acceptance rate at the first position on specdec's own prompts: {self.elsewhere:.2f}")
        if self.uncovered > MISSING:
            found.append(f"{100 * self.uncovered:.0f}% of the target's tokens are not in the draft's vocabulary")
        if idle := [method.name for method in self.drafting if not method.report.num_drafts]:
            found.append(f"drafted nothing on these prompts: {', '.join(idle)}")
        if lost := [method.name for method in self.drafting if method.report.num_drafts and not method.useful]:
            found.append(f"next to nothing of the drafts was accepted: {', '.join(lost)}")
        return [*found, *filter(None, [self.known_head])]

    def _format_limits(self) -> list[str]:
        method = self.best_draft
        if not method.useful:
            return []
        limits = [limit for limit in self.limits() if limit.seconds < (1 - WORTH) * method.seconds]
        if not limits:
            return ["", f"Neither its drafts nor its target passes slow {method.name} down."]
        listed = [f"  {limit.means}: {self._speed_up(limit.seconds, method):.2f}x" for limit in limits]
        most = limits[0]
        if self._speed_up(most.seconds, method) < 1:
            last = "None of these would make drafting faster than plain decoding here."
        else:
            last = f"The first limits the speed-up most. {most.cure}"
        speed_up = f"{method.name} has a speed-up of {self._speed_up(method.seconds, method):.2f}x"
        return ["", f"{speed_up}. It would be at most", *listed, last]

    def _speed_up(self, seconds: float, method: Measured) -> float:
        """Speed-up of a method if its calls had taken so many seconds."""
        return method.speed_up(self.plain).value * method.seconds / seconds

    @property
    def _unusual(self) -> bool:
        return self.elsewhere is not None and bool(self.acceptance) and self.elsewhere > self.acceptance[0] + UNUSUAL

    @property
    def _acceptance(self) -> str:
        by_a_model = self.best_draft.report.num_draft_passes > 0
        if by_a_model and self.uncovered > MISSING:
            advice = "use a larger vocabulary, from text like yours."
            return f"Each token outside of the draft's vocabulary ends a draft: {advice}"
        if by_a_model and self._unusual:
            return "Your prompts differ from the draft's training data, or they lack the chat template."
        lookup = "" if self.uses_lookup else ', or n-grams together with either ("ngram+eagle3", "ngram+draft:PATH")'
        return f"More is accepted with an EAGLE-3 head trained on text like yours, or a larger draft model{lookup}."

    @property
    def _drafting(self) -> str:
        if self.has_head:
            return "Faster: a head with a smaller --draft-vocab or --intermediate-size."
        return "Faster: a smaller draft model, an EAGLE-3 head, or vocab= to trim the draft model's."

    @property
    def _passes(self) -> str:
        report = self.best_draft.report
        ratio = report.seconds["verify"] / report.num_row_rounds / self.step
        slower = f"One of its target passes takes {ratio:.2f} times as long as plain decoding's"
        return f"{slower}: another number format (--dtype) may be faster."
