"""Draw the speed-ups in the tables of `benchmarks/results`.

    python -m benchmarks.chart docs/images/speed-up.svg

Reads the first table of each file that `compare.py` printed, and the line above it that describes the machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

RESULTS = Path(__file__).parent / "results"
PAIR, HEAD = "qwen-coder-pair-t0", "qwen-coder-0.5b-eagle3-t0"
# What is drawn of each table: methods as it calls them, and as people do.
METHODS = {
    "hf-lookup-10": "transformers, prompt lookup",
    "hf-assistant-2": "transformers, assistant model",
    "specdec-ngram": "specdec, n-grams",
    "specdec-draft": "specdec, draft model",
    "specdec-eagle3": "specdec, EAGLE-3 head",
    "specdec-ngram+eagle3": "specdec, head and n-grams",
}
COLOURS = dict(zip(METHODS, ("#bdbdbd", "#757575", "#80cbc4", "#00897b", "#4db6ac", "#004d40"), strict=True))
ALL = "mean of groups"
NAMES = {ALL: "all", "mt_bench": "chat", "math_reasoning": "mathematics", "qa": "questions", "rag": "retrieval"}

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Speedups:
    """A table of speed-ups by method and group of prompts, with its title and the description of the machine."""

    title: str
    machine: str
    by_method: dict[str, dict[str, float]]


def read(path: Path) -> Speedups:
    """Read the speed-ups from a file that `compare.py` printed.

    Raises:
        ValueError: the file has no table of speed-ups.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith("| method") and ALL in line), None)
    if start is None:
        raise ValueError(f"{path} has no table of speed-ups: give one that compare.py printed")
    groups = _cells(lines[start])[1:]
    rows = {cells[0]: cells[1:] for cells in _rows(lines[start + 2 :])}
    by_method = {
        method: {group: float(cell[:-1]) for group, cell in zip(groups, cells, strict=True)}
        for method, cells in rows.items()
        if all(re.fullmatch(r"[\d.]+x", cell) for cell in cells)
    }
    machine = next((line for line in reversed(lines[:start]) if "threads" in line), "")
    return Speedups(lines[0].removeprefix("# "), machine, by_method)


def draw(tables: list[Speedups]) -> Any:
    """Draw a panel per table, with the groups side by side and a line at 1 for plain decoding."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.3 * len(tables)), layout="constrained")
    for panel, table in zip(figure.subplots(len(tables), squeeze=False)[:, 0], tables, strict=True):
        methods = [method for method in METHODS if method in table.by_method]
        groups = [group for group in next(iter(table.by_method.values())) if group != "all questions"]
        width = 0.8 / len(methods)
        for place, method in enumerate(methods):
            at = [x + width * (place - (len(methods) - 1) / 2) for x in range(len(groups))]
            gains = [table.by_method[method][group] for group in groups]
            bars = panel.bar(at, gains, width=0.9 * width, color=COLOURS[method], label=METHODS[method])
            panel.bar_label(bars, fmt="%.2f", fontsize=6)
        panel.axhline(1, color="black", linewidth=0.8)
        panel.set_xticks(range(len(groups)), [NAMES.get(group, group) for group in groups])
        panel.set_title(table.title, fontsize="medium")
        panel.set_xlabel(table.machine, fontsize="xx-small")
        panel.set_ylabel("speed-up over generate()")
        panel.margins(y=0.3)  # for the legend
        panel.legend(fontsize="small", ncols=len(methods), loc="upper center", frameon=False)
    return figure


@app.command()
def main(
    out: Annotated[Path, typer.Argument(help="Chart to write: .svg or .png.")],
    table: Annotated[list[Path] | None, typer.Option(help="Files with tables. Default: those of the README.")] = None,
) -> None:
    """Draw speed-ups from tables."""
    import matplotlib

    # The same tables, the same file; text stays text.
    matplotlib.rcParams |= {"svg.hashsalt": "specdec", "svg.fonttype": "none"}
    found = [read(path) for path in table or (RESULTS / f"{name}.md" for name in (PAIR, HEAD))]
    out.parent.mkdir(parents=True, exist_ok=True)
    draw(found).savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None, facecolor="white")


def _rows(lines: list[str]) -> Iterator[list[str]]:
    for line in lines:
        if not line.startswith("|"):
            return
        yield _cells(line)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


if __name__ == "__main__":
    app()
