"""`SpeedUp`: how many times faster one method is than another, from calls that took turns, and how sure that is.

`bench`, `doctor`, their chart and `judge` all use this one definition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, log, sqrt

MEANING = "geometric mean over prompts and turns"
LEVEL = "99%"
WIDE = 3.0  # times the speed-up itself: the ends of a wider interval are not shown
# Quantiles of Student's t at 99.5% for 1, 2, ... degrees of freedom, and the normal distribution's.
QUANTILES, NORMAL = (63.657, 9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250, 3.169), 2.5758

Paces = Sequence[Sequence[float]]  # seconds per token by prompt, then by turn


@dataclass(frozen=True)
class SpeedUp:
    """Speed-up of a method over another: the geometric mean of the ratios of calls made in the same turn.

    The interval has 99% confidence, so that the intervals of several methods hold together. It comes from the spread of
    the logarithms of the ratios, by Student's t. With several turns this is the spread within each prompt: prompts
    differ in truth, not by noise. With a single turn it is the spread over the prompts.

    Attributes:
        by_prompt: speed-up on each prompt: the geometric mean over its turns.
        low: lower end of the interval; 0 if everything was measured once.
        high: upper end; infinite if everything was measured once.

    Examples:
        >>> found = SpeedUp.of([[2.0, 2.2], [1.0, 1.0]], over=[[4.0, 4.4], [1.0, 1.0]])
        >>> found.by_prompt
        (2.0, 1.0)
        >>> f"{found.value:.2f}"
        '1.41'
    """

    by_prompt: tuple[float, ...]
    low: float = 0.0
    high: float = inf

    @classmethod
    def of(cls, paces: Paces, over: Paces) -> SpeedUp:
        """Compare a method with another one.

        Args:
            paces: seconds per token of the method, by prompt and turn.
            over: those of the other method, in the same turns.
        """
        logs = [
            [log(other / mine) for mine, other in zip(turns, others, strict=True)]
            for turns, others in zip(paces, over, strict=True)
        ]
        means = [sum(turns) / len(turns) for turns in logs]
        centre, prompts, turns = sum(means) / len(means), len(means), len(logs[0])
        if turns > 1:
            squares = sum((one - mean) ** 2 for ones, mean in zip(logs, means, strict=True) for one in ones)
            freedom = prompts * (turns - 1)
        else:
            squares, freedom = sum((mean - centre) ** 2 for mean in means), prompts - 1
        by_prompt = tuple(map(exp, means))
        if not freedom:
            return cls(by_prompt)
        margin = quantile(freedom) * sqrt(squares / freedom / (prompts * turns))
        return cls(by_prompt, exp(centre - margin), exp(centre + margin))

    @property
    def value(self) -> float:
        """The speed-up over all prompts."""
        return geometric_mean(self.by_prompt)

    @property
    def interval(self) -> str:
        """The interval as "LOW to HIGH", for tables.

        "-" if everything was measured once. "too noisy" if it is wider than `WIDE` times either way.
        """
        if self.high == inf:
            return "-"
        return "too noisy" if self.high > WIDE * self.value else f"{self.low:.2f} to {self.high:.2f}"

    def __str__(self) -> str:
        return f"{self.value:.2f}x" + ("" if self.high == inf else f" ({self.interval})")


def geometric_mean(values: Sequence[float]) -> float:
    """The geometric mean, which is the same whichever of two methods is the baseline.

    Examples:
        >>> geometric_mean([2.0, 0.5])
        1.0
    """
    return exp(sum(map(log, values)) / len(values))


def quantile(freedom: int) -> float:
    """The 99.5% quantile of Student's t for so many degrees of freedom, to 1%.

    Examples:
        >>> quantile(1), round(quantile(20), 2)
        (63.657, 2.84)
    """
    if freedom <= len(QUANTILES):
        return QUANTILES[freedom - 1]
    z = NORMAL  # Cornish-Fisher expansion
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
