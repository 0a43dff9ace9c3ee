"""`judge`: which of several measured methods to use, or that the measurements are too noisy to tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdec.engine.report import Report
from specdec.evaluation.measured import USEFUL, Measured
from specdec.evaluation.speed_up import SpeedUp
from specdec.evaluation.timing import Call, Speed
from specdec.utils.prefix import common_prefix

NEAR = 1.03  # a method up to so many times as fast as plain decoding counts as equally fast
NEAR_DRAFT = 1.1  # likewise for two methods with drafts: whichever is listed first is preferred
TOO_NOISY = "too noisy to tell"


@dataclass(frozen=True)
class Verdict:
    """Result of `judge`.

    Attributes:
        recommended: the method to use. If not `certain`, the one to use meanwhile.
        certain: True if the measurements tell that it is the one to use.
        rivals: methods of which the measurements do not tell whether they are faster than the recommended one.
        faster: methods that are faster than plain decoding, by rule 2 of `judge`.
        plain: plain decoding.
        useful: True if drafts of any method were accepted.
    """

    recommended: Measured
    certain: bool
    rivals: tuple[Measured, ...]
    faster: tuple[Measured, ...]
    plain: Measured
    useful: bool

    def lines(self) -> list[str]:
        """Say the verdict: one recommendation, or that it is too noisy to tell and what would tell."""
        best, plain = self.recommended, self.plain
        if not self.certain:
            return [self._doubt(), self._cure(), f"meanwhile: {self._use()}"]
        if best is not plain:
            return [f"recommended: {self._use()}"]
        if not self.useful:
            return ["recommended: plain decoding, model.generate(): next to nothing of any draft was accepted"]
        return [f"recommended: plain decoding, model.generate(): no draft is more than {_percent(NEAR)} faster"]

    def _use(self) -> str:
        best = self.recommended
        if best is self.plain:
            return "plain decoding, model.generate()"
        speed_up = best.speed_up(self.plain)
        said = f"{best.name}, {speed_up.value:.2f}x plain decoding's speed ({speed_up.interval})"
        if not self.certain:
            return said
        return f"{said}: " + (
            f"no other is more than {_percent(NEAR_DRAFT)} faster" if self.faster[1:] else "the fastest"
        )

    def _doubt(self) -> str:
        names = [method.name for method in self.rivals]
        if self.recommended is self.plain:
            return f"{TOO_NOISY} whether {_listed(names, 'or')} is faster than plain decoding"
        known = _listed([method.name for method in self.faster], "and")
        doubt = f"{TOO_NOISY} which is the fastest: {_listed([self.recommended.name, *names], 'or')}"
        return f"{doubt}. Faster than plain decoding: {known}"

    def _cure(self) -> str:
        more = 2 * self.plain.turns if self.plain.turns > 1 else 5
        turns = f"more turns (--repeat {more}; repeats={more} in Python)"
        return f"what would tell: nothing else running on the machine, {turns}, or more prompts"


def judge(plain: Measured, drafting: Sequence[Measured]) -> Verdict:
    """Choose between plain decoding and methods with drafts.

    The rule, by acceptance first:

    1. A method of whose drafts next to nothing was accepted (less than 1.03 tokens per round) is never recommended.
       Whatever made its calls faster, it was not its drafts.
    2. Methods are compared by `SpeedUp`: calls of the same turn, with a 99% interval. A method pays if the interval of
       its speed-up over plain decoding lies above 1.03. It does not if the interval lies below.
    3. Of the methods that pay, an earlier one is preferred, unless a later one is more than 1.1 times as fast by the
       same test. Methods are listed so that those which need no setting come first.
    4. Whenever an interval that decides contains its bound, the verdict is "too noisy to tell". So two runs that give
       different recommendations would need an interval that misses the truth, of which there is 1 in 100.

    Args:
        plain: plain decoding.
        drafting: methods with drafts, the preferred ones first.
    """
    useful = [method for method in drafting if method.useful]
    speeds = {id(method): method.speed_up(plain) for method in useful}
    faster = tuple(method for method in useful if speeds[id(method)].low > NEAR)
    perhaps = [method for method in useful if speeds[id(method)].low <= NEAR < speeds[id(method)].high]
    if not faster:
        return Verdict(plain, not perhaps, tuple(perhaps), (), plain, bool(useful))
    best = next(one for one in faster if not any(_beats(other, one) for other in faster))
    order = [method for method in useful if method in faster or method in perhaps]
    rivals = tuple(method for method in order if method is not best and not _settled(best, method, order, faster))
    return Verdict(best, not rivals, rivals, faster, plain, True)


def _beats(method: Measured, over: Measured) -> bool:
    return method.speed_up(over).low > NEAR_DRAFT


def _settled(best: Measured, other: Measured, order: Sequence[Measured], faster: Sequence[Measured]) -> bool:
    """Return whether the measurements tell that another method is not the one to use instead of `best`."""
    if order.index(other) < order.index(best):
        return any(_beats(one, other) for one in faster)
    return other.speed_up(best).high <= NEAR_DRAFT


def compared_once(plain: Call, report: Report) -> str:
    """Compare a single call with one of plain decoding, which shows no noise: by rule 4 of `judge` no verdict follows.

    Args:
        plain: the call of plain decoding.
        report: report of the other call.
    """
    plain_seconds = Speed.of([plain]).time_per_token
    speed_up = SpeedUp.of([[1 / report.tokens_per_second]], over=[[plain_seconds]])
    if not report.tokens_per_round >= USEFUL:
        why = "next to nothing of the drafts was accepted, so drafting made nothing faster"
    else:
        why = f"from one call each it is {TOO_NOISY} more (`specdec bench`)"
    return f"{speed_up} plain decoding, whose whole call wrote {1 / plain_seconds:.1f} tokens/s: {why}"


def compared_texts(plain: Sequence[int], tokens: Sequence[int], dtype: torch.dtype) -> str:
    """Answer whether a text that should be plain decoding's is the same."""
    same = common_prefix(plain, tokens)
    if same == len(plain) == len(tokens):
        return "yes, token for token"
    if dtype.itemsize < 4:
        name = str(dtype).removeprefix("torch.")
        why = f"most likely a near tie, which {name} may round either way (--exact gives the same text on CPUs)"
    else:
        why = "more than rounding explains. Please report this, with the command"
    return f"for {same} tokens, then it differs: {why}"


def _percent(bound: float) -> str:
    return f"{100 * (bound - 1):.0f}%"


def _listed(names: Sequence[str], word: str) -> str:
    """Join names as in "a, b or c"."""
    return f" {word} ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
