"""`Results`: rows of measurements, as lines of JSON when they come, and as tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.gpu.setting import Row
from benchmarks.gpu.speed import EAGER, STATIC
from benchmarks.harness.table import number, table

HIDDEN = ("part", "table", "took", "failure", "rounds ms", "warned")  # keys that are no columns
OVER = {EAGER: "over eager", STATIC: "over static"}  # columns of speed-ups, by their baseline


class Results:
    """Rows in a folder's results.jsonl and results.md.

    Args:
        folder: is created. Its results.jsonl is replaced, if it is this benchmark's.

    Raises:
        ValueError: the folder holds another benchmark's results.
    """

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._lines = folder, folder / "results.jsonl"
        if self._lines.exists() and not (folder / "machine.json").exists():
            raise ValueError(f"{self._lines} is not of this benchmark: choose another --out")
        self._lines.write_text("")
        for old in [*folder.glob("failure-*.txt"), *folder.glob("kernels-*.md")]:
            old.unlink()
        self.rows: list[Row] = []

    def note(self, row: Row) -> None:
        """Add a row to the file at once."""
        self.rows.append(row)
        with self._lines.open("a") as file:
            file.write(json.dumps(row, default=str) + "\n")

    def write_tables(self) -> None:
        """Write results.md, and results.png where matplotlib is installed."""
        (self.folder / "results.md").write_text(tables(self.rows))
        try:
            draw(self.rows, self.folder / "results.png")
        except ImportError:
            return


def tables(rows: list[Row]) -> str:
    """Format all rows: a section for each part, with a table for each of its kinds of rows."""
    rows = compared(with_floors(rows))
    sections = []
    for part in dict.fromkeys(row["part"] for row in rows):
        mine = [row for row in rows if row["part"] == part]
        took = next((f" ({row['took']:.0f} s)" for row in mine if "took" in row), "")
        section = [f"## {part}{took}"]
        for kind in dict.fromkeys(row.get("table", "") for row in mine):
            some = [row for row in mine if row.get("table", "") == kind and not set(row) <= {"part", "took", "failure"}]
            head = list(dict.fromkeys(key for row in some for key in row if key not in HIDDEN))
            if len(some) == 1 and len(head) > 12:  # a long list
                head, lines = ["", kind], [[key, shown(some[0][key])] for key in head]
            else:
                section += [f"*{kind}*"] if kind else []
                lines = [[shown(row.get(key)) for key in head] for row in some]
            section += [table(head, lines)] if lines else []
        section += [f"Rounds of {row['method']}: {shown(row['rounds ms'])} ms" for row in mine if "rounds ms" in row]
        section += [f"Warning of {named(row)}: {text}" for row in mine for text in row.get("warned", [])]
        section += [f"**Failed: {row['failure']}**" for row in mine if "failure" in row]
        sections.append("\n\n".join(section))
    return "\n\n".join(sections) + "\n"


def named(row: Row) -> str:
    return str(row.get("method") or row.get("hazard") or row["part"])


def with_floors(rows: list[Row]) -> list[Row]:
    """Add the least time of a pass and of a token: reading what a pass needs, at the bandwidth measured in this run."""
    bandwidth = next((row["GB/s"] for row in rows if "GB/s" in row), None)
    if bandwidth is None:
        return rows
    return [row | floors(row, bandwidth) if "pass GB" in row else row for row in rows]


def floors(row: Row, bandwidth: float) -> Row:
    a_pass = 1e3 * row["pass GB"] / bandwidth
    token = {"floor ms a token": a_pass / row["tokens a pass"]} if row.get("tokens a pass") else {}
    return {"floor ms a pass": a_pass} | token


def compared(rows: list[Row]) -> list[Row]:
    """Add speed-ups over plain decoding of the same model, batch and prompt in this run."""

    def place(row: Row) -> tuple[Any, ...]:
        return tuple(row.get(key) for key in ("model", "batch", "prompt", "new"))

    plain = {(row["method"], *place(row)): row["ms a token"] for row in rows if row.get("method") in OVER}
    out = []
    for row in rows:
        found = {OVER[name]: plain.get((name, *place(row))) for name in OVER}
        ratios = {key: ms / row["ms a token"] for key, ms in found.items() if ms and "ms a token" in row}
        out.append(row | ratios)
    return out


def draw(rows: list[Row], file: Path) -> None:
    """Draw the tokens per second of every method, with a panel for each part."""
    from matplotlib.figure import Figure

    rows = [row for row in rows if "tokens/s" in row and "method" in row]
    parts = list(dict.fromkeys(row["part"] for row in rows))
    if not parts:
        return
    figure = Figure(figsize=(9, 3 * len(parts)), layout="constrained")
    for panel, part in zip(figure.subplots(len(parts), squeeze=False)[:, 0], parts, strict=True):
        mine = [row for row in rows if row["part"] == part]
        names = [f"{row['method']}\n{row['batch']} x {row['prompt']}" for row in mine]
        panel.bar_label(panel.barh(names, [row["tokens/s"] for row in mine]), fmt="%.0f", fontsize=6)
        panel.set_title(part, fontsize="medium")
        panel.set_xlabel("tokens/s", fontsize="x-small")
        panel.tick_params(labelsize=6)
        panel.invert_yaxis()
    figure.savefig(file, dpi=150)


def shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(shown, value))
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if not isinstance(value, (int, float)):
        return "-" if value is None else str(value)
    return number(value)
