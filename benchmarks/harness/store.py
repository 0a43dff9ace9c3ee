"""`Store`: keeps finished measurements on disk, so that a stopped run can resume."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from benchmarks.harness.measure import Record


class Store:
    """A folder with `settings.json` and `results.jsonl`, one line per measurement.

    Args:
        settings: settings that the measurements depend on. They must equal those of the folder.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]):
        self.folder = folder
        self.fingerprint = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
        self.records: list[Record] = []
        folder.mkdir(parents=True, exist_ok=True)
        self._lines = folder / "results.jsonl"
        self._check(settings)
        if self._lines.exists():
            self._read()

    @property
    def done(self) -> set[tuple[str, str, int]]:
        return {record.key for record in self.records}

    def append(self, record: Record) -> None:
        with self._lines.open("a", encoding="utf-8") as file:
            file.write(record.to_json() + "\n")
        self.records.append(record)

    def _check(self, settings: dict[str, Any]) -> None:
        path = self.folder / "settings.json"
        if not path.exists():
            if self._lines.exists():
                raise ValueError(f"{self._lines} has no settings.json beside it: choose another --out")
            path.write_text(json.dumps(settings, indent=2) + "\n")
            return
        before = json.loads(path.read_text())
        changed = [
            f"{name} was {before.get(name)!r} and is {settings.get(name)!r}"
            for name in sorted(before.keys() | settings.keys())
            if before.get(name) != settings.get(name)
        ]
        if changed:
            raise ValueError(
                f"{self.folder} holds results of other settings ({'; '.join(changed)}): choose another --out"
            )

    def _read(self) -> None:
        content = self._lines.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        for number, line in enumerate(whole.decode().splitlines(), start=1):
            try:
                record = Record.from_json(line)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{self._lines}, line {number} cannot be read ({error}): delete the line") from error
            if record.fingerprint != self.fingerprint:
                raise ValueError(
                    f"{self._lines}, line {number} was measured with other settings ({record.fingerprint}, now "
                    f"{self.fingerprint}): choose another --out"
                )
            self.records.append(record)
        if len(whole) < len(content):  # the process was stopped while it wrote the last line
            self._lines.write_bytes(whole)
