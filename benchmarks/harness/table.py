"""Markdown tables of measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.harness.identity import Identity
from benchmarks.harness.summary import Best, MethodSummary


def speed_table(rows: Sequence[MethodSummary], best: Best | None) -> str:
    """Format speed-ups over plain decoding: overall, mean over groups, and each group."""
    groups = list(dict.fromkeys(group for row in rows for group in row.by_group))
    lines = [
        [row.name, times(row.overall), times(row.mean), *(times(row.by_group.get(group)) for group in groups)]
        for row in rows
    ]
    if best is not None:
        lines.append(
            ["best hf setting per group", "", times(best.per_group_mean), *(best.per_group[g] for g in groups)]
        )
    return table(["method", "all questions", "mean of groups", *groups], lines)


def detail_table(rows: Sequence[MethodSummary], identities: Mapping[str, Identity]) -> str:
    """Format acceptance and times. Rates are pooled over all rounds, times are averages over questions."""
    head = (
        "method|tokens/s|decode only|tokens per pass|acceptance rate|mean acceptance length|TTFT ms|ms/token|"
        "draft|verify|overhead|as plain"
    ).split("|")
    lines = []
    for row in rows:
        report, counts, shares = row.report, ["-"] * 2, ["-"] * 3
        if report is not None:
            counts = [number(report.draft_acceptance_rate), number(report.mean_acceptance_length)]
            shares = [percent(report.seconds[phase], report.round_seconds) for phase in ("draft", "verify")]
            shares.append(percent(report.overhead, 1))
        speeds = [number(row.tokens_per_second), times(row.decode), number(row.tokens_per_pass)]
        milliseconds = [number(1e3 * row.time_to_first_token), number(1e3 * row.time_per_output_token)]
        same = str(identities[row.name]) if row.name in identities else "-"
        lines.append([row.name, *speeds, *counts, *milliseconds, *shares, same])
    return table(head, lines)


def best_lines(rows: Sequence[MethodSummary], best: Best | None) -> str:
    """Compare specdec with the best methods of transformers."""
    if best is None:
        return "transformers' own assisted generation was not measured."
    text = (
        f"Best of transformers' assisted settings: one for all groups, **{best.single}** {times(best.single_mean)} "
        f"(mean of groups); the best one of each group {times(best.per_group_mean)}.\n\n"
    )
    lines = [
        [row.name, times(row.mean), times(row.mean / best.single_mean), times(row.mean / best.per_group_mean)]
        for row in rows
        if row.name.startswith("specdec-")
    ]
    return text + table(["method", "over plain", f"over {best.single}", "over the best of each group"], lines)


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table that is also aligned as plain text."""
    cells = [list(head), *map(list, lines)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    shown = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in cells
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([shown[0], rule, *shown[1:]])


def times(ratio: float | None) -> str:
    return "-" if ratio is None or ratio != ratio else f"{ratio:.2f}x"


def number(value: float) -> str:
    if value != value:
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}%" if whole and part == part else "-"
