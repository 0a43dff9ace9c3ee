"""`Measured`: measurements of one method over all prompts and turns; `table` formats several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.engine.report import Report
from specdec.evaluation.speed_up import SpeedUp

USEFUL = 1.03  # tokens per round below which next to nothing of a method's drafts was accepted


@dataclass(frozen=True)
class Measured:
    """Measurements of one method over all prompts.

    Attributes:
        name: name of the method.
        code: code that builds it.
        tokens: number of new tokens.
        seconds: duration of all calls, prefill included.
        first: mean seconds from the start of a call to its first token.
        report: report of the calls; empty for plain decoding.
        paces: seconds per token of each call, by prompt and turn. By default one call of all tokens.
    """

    name: str
    code: str
    tokens: int
    seconds: float
    first: float
    report: Report = field(default_factory=Report)
    paces: tuple[tuple[float, ...], ...] = ()

    @property
    def pace(self) -> float:
        """Seconds per token over all calls."""
        return self.seconds / self.tokens

    @property
    def turns(self) -> int:
        """Number of calls per prompt."""
        return len(self.paces[0]) if self.paces else 1

    def speed_up(self, over: Measured) -> SpeedUp:
        """Return how many times faster this method is than another one, which took turns with it."""
        return SpeedUp.of(self.paces or ((self.pace,),), over.paces or ((over.pace,),))

    @property
    def useful(self) -> bool:
        """True if more than next to nothing of the drafts was accepted. Otherwise drafting cannot make it faster."""
        return self.report.tokens_per_round >= USEFUL


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows as lines with aligned columns, the first one left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
