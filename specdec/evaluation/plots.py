"""Plots of speculative decoding: draft trees, acceptance rate by position, time by phase, speed-ups.

They need matplotlib (`pip install matplotlib`), which is imported on the first plot. Each returns its axes.

Example:
    ```python
    with spec.watch() as rounds:
        spec.generate(**inputs, max_new_tokens=64)
    plots.round_tree(rounds[0], tokenizer)
    plots.acceptance_per_position(spec.last_report)
    ```
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Any

from specdec.engine.counts import PHASES
from specdec.engine.report import Report
from specdec.engine.trace import RoundTrace, shown
from specdec.evaluation.speed_up import LEVEL, MEANING, SpeedUp
from specdec.sampling.results import depths_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ACCEPTED, REJECTED, BONUS = "#2e7d32", "#9e9e9e", "#1565c0"
PART_COLOURS = {"prefill": "#90a4ae", "draft": "#fb8c00", "verify": "#1e88e5", "accept": "#43a047", "other": "#8e24aa"}
BAR, DOT = "#80cbc4", "#00695c"
Reports = Report | Mapping[str, Report]


def round_tree(round: RoundTrace, tokenizer: Any = None, ax: Axes | None = None) -> Axes:
    """Draw the draft tree of a round from left to right.

    Accepted nodes are green. The bonus or recovered token is blue. Below each drafted token is p, the target's
    probability of it after its parent.

    Args:
        round: the trace of the round, from `SpeculativeGenerator.watch()`.
        tokenizer: decodes tokens; None to show token ids.
        ax: axes to draw on; None for a new figure.

    Example:
        ```python
        plots.round_tree(rounds[0], tokenizer).figure.savefig("round.png")
        ```
    """
    depths, heights = depths_of(round.parents), _heights(round.parents)
    bonus = len(depths)  # the bonus or recovered token is drawn as one more node, after the accepted path
    if round.next_token is not None:
        depths.append(len(round.path))
        heights.append(_free_height(heights, depths, heights[round.path[-1]]))
    ax = ax or _new_axes(1.7 * (max(depths) + 1), 0.9 + 0.5 * (1 + max(heights) - min(heights)))

    def edge(above: int, below: int, colour: str, style: str = "-") -> None:
        ends = [depths[above], depths[below]], [-heights[above], -heights[below]]
        ax.plot(*ends, style, color=colour, linewidth=2 if colour == ACCEPTED else 1, zorder=1)

    def node(number: int, token: int, colour: str, chance: float | None) -> None:
        label = shown(token, tokenizer).replace("$", r"\$") + ("" if chance is None else f"\np={chance:.2f}")
        box = {"boxstyle": "round", "facecolor": "white", "edgecolor": colour, "linewidth": 1.5}
        place = depths[number], -heights[number]
        ax.text(*place, label, color=colour, ha="center", va="center", fontsize="small", bbox=box, zorder=2)

    for below, above in enumerate(round.parents):
        colour = ACCEPTED if below in round.path else REJECTED
        if above >= 0:
            edge(above, below, colour)
        node(below, round.tokens[below], colour if below else "black", round.chances[below] if below else None)
    if round.next_token is not None:
        edge(round.path[-1], bonus, BONUS, "--")
        node(bonus, round.next_token, BONUS, None)
    ax.set_title(f"{len(round.tokens) - 1} drafted, {len(round.path) - 1} accepted, {len(round.new_tokens)} new tokens")
    ax.set(xlim=(-0.5, max(depths) + 0.5), ylim=(-max(heights) - 0.6, -min(heights) + 0.6))
    ax.axis("off")
    return ax


def acceptance_per_position(reports: Reports, ax: Axes | None = None) -> Axes:
    """Draw the conditional acceptance rate by position (depth) in the draft, one line per report.

    Args:
        reports: a report, or several by name.
        ax: axes to draw on; None for a new figure.

    Example:
        ```python
        plots.acceptance_per_position({"ngram": ngram.report, "eagle3": eagle3.report})
        ```
    """
    ax = ax or _new_axes(6, 3.5)
    for name, report in _named(reports).items():
        rates = report.conditional_acceptance_rate_per_pos
        length = f"{report.mean_acceptance_length:.2f} tokens per draft" if report.num_drafts else "no drafts"
        label = f"{name} ({length})".strip()
        ax.plot(range(1, len(rates) + 1), rates, "o-", label=label)
    ax.set(xlabel="position in the draft", ylabel="conditional acceptance rate", ylim=(0, 1.05))
    ax.locator_params("x", integer=True)
    ax.legend()
    return ax


def time_per_part(reports: Reports, ax: Axes | None = None) -> Axes:
    """Draw the time per new token in each phase, prefill included, one bar per report.

    Args:
        reports: a report, or several by name.
        ax: axes to draw on; None for a new figure.

    Example:
        ```python
        plots.time_per_part(spec.last_report)
        ```
    """
    named = _named(reports)
    ax = ax or _new_axes(6, 1.2 + 0.4 * len(named))
    ends = [0.0] * len(named)
    for part in PHASES:
        spent = [1e3 * report.seconds[part] / max(1, report.num_output_tokens) for report in named.values()]
        ax.barh(range(len(named)), spent, left=ends, color=PART_COLOURS[part], label=part)
        ends = [end + more for end, more in zip(ends, spent, strict=True)]
    ax.set_yticks(range(len(named)), list(named))
    ax.invert_yaxis()  # the first on top
    ax.set_xlabel("ms per new token")
    ax.legend(ncols=len(PHASES), loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize="small", frameon=False)
    return ax


def speed_ups(by_prompt: Mapping[str, SpeedUp | Sequence[float]], ax: Axes | None = None) -> Axes:
    """Draw speed-ups over plain decoding: the value of each proposer as a bar and in words, with one dot per prompt.

    The value is that of the table: the geometric mean. A black line over the bar is its interval.

    Args:
        by_prompt: speed-ups by proposer, such as `Bench.speed_up_of`, or only their speed-ups by prompt.
        ax: axes to draw on; None for a new figure.

    Example:
        ```python
        plots.speed_ups(bench(model, proposers, prompts).speed_up_of)
        ```
    """
    ax = ax or _new_axes(8, 1.4 + 0.5 * len(by_prompt))
    found = [one if isinstance(one, SpeedUp) else SpeedUp(tuple(one)) for one in by_prompt.values()]
    beside = ax.get_yaxis_transform()  # x in shares of the width, so that words stand clear of lines, bars and dots
    for height, speed_up in enumerate(found):
        ax.barh(height, speed_up.value, color=BAR, height=0.7, zorder=1)
        if speed_up.high < inf:
            ax.plot([speed_up.low, speed_up.high], [height] * 2, "|-", color="black", linewidth=1, zorder=3)
        ax.plot(
            speed_up.by_prompt, [height] * len(speed_up.by_prompt), "o", color=DOT, markersize=4, alpha=0.7, zorder=4
        )
        ax.text(1.01, height, str(speed_up), transform=beside, va="center", fontsize="small")
    ax.axvline(1, color="black", linewidth=0.8, zorder=2)
    ax.set_yticks(range(len(by_prompt)), list(by_prompt))
    ax.invert_yaxis()  # the first on top
    most = max(max(speed_up.value, *speed_up.by_prompt) for speed_up in found)
    ax.set(xlim=(0, 1.1 * max(1.0, most)))  # however wide an interval is
    ax.set_xlabel(f"speed-up over plain decoding: {MEANING},\n{LEVEL} interval, and one dot per prompt")
    return ax


def _named(reports: Reports) -> Mapping[str, Report]:
    return {"": reports} if isinstance(reports, Report) else reports


def _new_axes(width: float, height: float) -> Axes:
    """Make axes in a new pyplot figure of this size in inches.

    Notebooks show the figure; scripts call `plt.show()` or `axes.figure.savefig(...)`.
    """
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError(
            "specdec.evaluation.plots draws with matplotlib, which is not installed: pip install matplotlib"
        ) from error
    return pyplot.subplots(figsize=(width, height), layout="constrained")[1]


def _heights(parents: list[int]) -> list[float]:
    """Height of each node: leaves lie below each other, and a parent at the middle of its children."""
    heights, leaf = [0.0] * len(parents), count()

    def place(node: int) -> float:
        children = [place(child) for child, parent in enumerate(parents) if parent == node]
        heights[node] = (children[0] + children[-1]) / 2 if children else float(next(leaf))
        return heights[node]

    place(0)
    return heights


def _free_height(heights: list[float], depths: list[int], wanted: float) -> float:
    """Height closest to `wanted` at which no node of the last depth is within one unit."""
    taken = [height for height, depth in zip(heights, depths, strict=False) if depth == depths[-1]]
    steps = (wanted + sign * step / 2 for step in range(2 * len(heights) + 3) for sign in (1, -1))
    return next(height for height in steps if all(abs(height - other) >= 1 for other in taken))
