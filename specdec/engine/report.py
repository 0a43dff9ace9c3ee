"""`Report`: counts of speculative decoding as text and as values for JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from html import escape
from typing import Any

from specdec.engine.counts import Counts

Rows = list[tuple[str, str]]
SPEED_UP = "speed-up"
NOT_EXPORTED = ("num_row_rounds", "num_draft_tokens_per_pos", "latencies", "times_to_first_token")  # see `to_dict`
EXPORTED_RATES = (
    "draft_acceptance_rate",
    "mean_acceptance_length",
    "tokens_per_round",
    "acceptance_rate_per_pos",
    "conditional_acceptance_rate_per_pos",
    "time_to_first_token",
    "time_per_output_token",
    "time_per_output_token_p50",
    "time_per_output_token_p99",
    "tokens_per_second",
    "seconds_per_draft_pass",
    "estimated_speed_up",
    "building_share",
    "overhead",
)


class Report(Counts):
    """Counters of one or more `generate()` calls. `print` shows a summary of them, and notebooks the full table.

    Attributes and rates are those of `Counts`.

    Examples:
        >>> report = Report(num_calls=1)
        >>> report.record_round(drafted=[4, 2], depths=[4, 2], accepted=[3, 0], seconds=0.5)
        >>> report.mean_acceptance_length
        2.5
    """

    def to_dict(self) -> dict[str, Any]:
        """Return counts, seconds and rates as JSON-serialisable values; undefined rates are None."""
        names = [one.name for one in fields(self) if one.name not in NOT_EXPORTED] + [*EXPORTED_RATES]
        return {name: _finite(getattr(self, name)) for name in names}

    def to_json(self) -> str:
        """Return `to_dict()` as a JSON string."""
        return json.dumps(self.to_dict())

    def summary(self) -> Rows:
        """Return the rows that `print(report)` shows as (name, value), in plain words."""
        rows: Rows = []
        if self.num_drafts and self.estimated_speed_up == self.estimated_speed_up:
            rows.append((SPEED_UP, f"about {self.estimated_speed_up:.1f}x plain decoding, after the first token"))
        rows.append(("output tokens", self._output()))
        if self.num_row_rounds:
            per_row = " for each row" if self.num_rows > self.num_calls else ""
            rows.append(("tokens per pass", f"{self.tokens_per_round:.2f}{per_row}, where plain decoding gets 1"))
            rows.append(("drafted tokens", self._drafted()))
        if self.round_seconds:
            rows.append(("time per token", self._time_per_token()))
        if self.num_plain_calls:
            why = "; ".join(f"{reason} ({count})" for reason, count in self.plain_reasons.items())
            rows.append(("plain decoding", f"{self.num_plain_calls} of {_count(self.num_calls, 'call')}: {why}"))
        if self.num_exact_calls:
            calls = f"{self.num_exact_calls} of {_count(self.num_calls, 'call')}"
            rows.append(("exact", f"{calls}, bit for bit as plain decoding"))
        return [*rows, *self._raised()]

    def table(self) -> Rows:
        """Return the rows of the full table as (name, value); undefined values are "-"."""
        known = [rate for rate in self.conditional_acceptance_rate_per_pos[:10] if rate == rate]
        per_pos = " ".join(f"{rate:.2f}" for rate in known) or "-"
        rounds = self.round_seconds
        shares = ", ".join(
            f"{phase} {100 * seconds / rounds:.0f}%"
            for phase, seconds in self.seconds.items()
            if phase != "prefill" and rounds
        )
        by = ", ".join(
            f"{name} {1 + self.num_accepted_tokens_by[name] / drafts:.2f} over {drafts} drafts"
            for name, drafts in sorted(self.num_drafts_by.items())
            if drafts
        )
        rows = [
            ("calls (as plain decoding)", f"{self.num_calls} ({self.num_plain_calls})"),
            *(("plain decoding, because", f"{why} ({count})") for why, count in self.plain_reasons.items()),
            *([("exact calls", f"{self.num_exact_calls}")] if self.num_exact_calls else []),
            *self._raised(),
            ("output tokens", f"{self.num_output_tokens}"),
            ("drafts", f"{self.num_drafts} in {self.num_row_rounds} rounds"),
            ("draft acceptance rate", f"{self.draft_acceptance_rate:.3f}"),
            ("mean acceptance length", f"{self.mean_acceptance_length:.2f} tokens per draft"),
            *([("of it, by proposer", by)] if "," in by else []),
            ("tokens per target pass", f"{self.tokens_per_round:.2f}"),
            ("conditional rate per position", per_pos),
            ("time to first token", f"{1e3 * self.time_to_first_token:.1f} ms"),
            (
                "time per output token",
                f"{1e3 * self.time_per_output_token:.1f} ms (p50 {1e3 * self.time_per_output_token_p50:.1f}, "
                f"p99 {1e3 * self.time_per_output_token_p99:.1f})",
            ),
            ("throughput", f"{self.tokens_per_second:.1f} tokens/s"),
            ("estimated speed-up", f"{self.estimated_speed_up:.2f}"),
            *(
                [("draft passes", f"{self.num_draft_passes} of {1e3 * self.seconds_per_draft_pass:.1f} ms")]
                if self.num_draft_passes
                else []
            ),
            ("where the rounds' time went", shares or "-"),
            (
                "making and accepting drafts",
                f"{100 * self.building_share:.0f}%, draft passes excluded" if rounds else "-",
            ),
        ]
        return [(name, "-" if value.startswith("nan") else value) for name, value in rows]

    def details(self) -> str:
        """Return the full table as text: every rate and time, in the field's terms."""
        return aligned(self.table())

    def __str__(self) -> str:
        return aligned(self.summary())

    def __repr__(self) -> str:
        exceptions = {"as plain decoding": self.num_plain_calls, "raised": self.num_failed_calls}
        details = ", ".join(f"{count} {what}" for what, count in exceptions.items() if count)
        parts = [f"{self.num_calls} calls" + (f" ({details})" if details else ""), f"{self.num_output_tokens} tokens"]
        if self.total_seconds:
            parts.append(f"{self.tokens_per_second:.1f} tokens/s")
        if self.num_drafts:
            parts.append(f"mean acceptance length {self.mean_acceptance_length:.2f}")
        return f"<Report: {', '.join(parts)}>"

    def _repr_html_(self) -> str:
        """Return the full table as HTML, for notebooks."""
        cells = "".join(
            f"<tr><th style='text-align:left'>{escape(name)}</th><td style='text-align:left'>{escape(value)}</td></tr>"
            for name, value in self.table()
        )
        return f"<table>{cells}</table>"

    def _output(self) -> str:
        output = f"{self.num_output_tokens}"
        if self.num_calls != 1:
            output += f" in {_count(self.num_calls, 'call')}"
        if self.total_seconds:
            output += f", {self.tokens_per_second:.1f} per second"
        if self.times_to_first_token:
            output += f", the first after {self.time_to_first_token:.2f} s"
        return output

    def _drafted(self) -> str:
        if not self.num_draft_tokens:
            return "none"
        rate = self.num_accepted_tokens / self.num_draft_tokens
        trees = self.num_draft_tokens > sum(self.num_draft_tokens_per_pos)
        counts = f"{self.num_accepted_tokens} of {self.num_draft_tokens}"
        counts += ", alternatives for the same place included" if trees else ""
        names = " and ".join(sorted(name for name, drafts in self.num_drafts_by.items() if name and drafts))
        return f"{100 * rate:.0f}% accepted ({counts})" + (f", drafted by {names}" if names else "")

    def _time_per_token(self) -> str:
        seconds, rounds = self.seconds, self.round_seconds
        shares = {"passes of the model": seconds["verify"], "drafting": seconds["draft"]}
        shares["other"] = rounds - sum(shares.values())
        went = ", ".join(f"{100 * part / rounds:.0f}% {what}" for what, part in shares.items())
        return f"{1e3 * self.time_per_output_token:.1f} ms: {went}" if self.latencies else went

    def _raised(self) -> Rows:
        return [("calls that raised", f"{self.num_failed_calls}")] if self.num_failed_calls else []


def aligned(rows: Sequence[tuple[str, str]]) -> str:
    """Format rows as lines, with the values in one column."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value == value else None
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return value
