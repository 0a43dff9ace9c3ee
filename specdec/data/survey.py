"""`survey`: one pass over the files of a training run, before any library of models is imported.

It finds broken lines and files without texts, computes the checksum of the texts, and counts the entries whose answers
`regenerate` recorded, by the target that wrote them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from specdec.data.entries import FORMATS, read_entries
from specdec.data.skipped import Skipped
from specdec.utils.paths import named

FIELDS = ("text", "response", "messages", "conversations", "prompt")  # an entry has at least one of them


@dataclass(frozen=True)
class Survey:
    """Contents of the files of a training run.

    Attributes:
        checksum: checksum of all entries, before any chat template.
        entries: number of entries to train on.
        writers: number of these entries by the target that wrote their answers, as `regenerate` recorded it. Entries of
            other files are in none of them.
    """

    checksum: str
    entries: int
    writers: Mapping[str, int]

    def origin(self, target: str) -> str:
        """Say what the files record about who wrote the answers.

        Examples:
            >>> Survey("", 3, {}).origin("my/model")
            'whether my/model wrote these answers is unknown: `specdec regenerate` lets it write them, and records this'
            >>> Survey("", 3, {"my/model": 3}).origin("my/model")
            'my/model wrote these answers, as `specdec regenerate` recorded'
        """
        own = sum(count for name, count in self.writers.items() if named(name) == named(target))
        others = sorted(name for name in self.writers if named(name) != named(target))
        unknown = self.entries - sum(self.writers.values())
        if own == self.entries:
            return f"{target} wrote these answers, as `specdec regenerate` recorded"
        better = f"`specdec regenerate` lets {'it' if not own and not others else target} write them"
        if not own and not others:
            return f"whether {target} wrote these answers is unknown: {better}, and records this"
        parts = [f"{own} of {self.entries} entries are answered by {target}, as `specdec regenerate` recorded"]
        parts += [f"{self.writers[name]} by {name}" for name in others[:3]]
        parts += [f"{sum(self.writers[name] for name in others[3:])} by further targets"] if others[3:] else []
        parts += [f"for {unknown} this is unknown"] if unknown else []
        return f"{', '.join(parts)}: {better}"


def survey(data: Path, held_out: Path | None = None) -> Survey:
    """Read all entries of the texts to train on, and of a file of held-out texts. Later calls remember the result.

    Raises:
        ValueError: a file is empty, cannot be parsed, or contains no entry of a known format.
    """
    return _survey(data, held_out, _state(data), _state(held_out))


@lru_cache(maxsize=8)
def _survey(data: Path, held_out: Path | None, *state_of_files: Any) -> Survey:
    content, writers, count = hashlib.sha256(), Counter[str](), 0
    for entry in _checked(data):
        content.update(json.dumps(entry, sort_keys=True, default=_lasting).encode())
        count += 1
        if (name := _writer(entry)) is not None:
            writers[name] += 1
    for entry in _checked(held_out) if held_out is not None else ():
        content.update(json.dumps(entry, sort_keys=True, default=_lasting).encode())
    return Survey(content.hexdigest(), count, writers)


def _lasting(value: Any) -> str:
    """An image or another object as a text that is the same in each process: without its address in memory."""
    return re.sub(r" at 0x[0-9A-Fa-f]+", "", str(value))


def _checked(file: Path) -> Iterator[Any]:
    """Yield all entries of a file. Raise ValueError at its end if none has a known format."""
    unknown, known = Skipped("texts"), 0
    for place, entry in read_entries(file):
        if isinstance(entry, dict) and any(entry.get(name) is not None for name in FIELDS):
            known += 1
        else:
            unknown.add(place, f"expected {FORMATS}")
        yield entry
    unknown.check(known)


def _writer(entry: Any) -> str | None:
    """Return the target that `regenerate` recorded in an entry; None for entries of other files, or without a name."""
    if not isinstance(entry, dict) or not {"id", "target", "sequences", "messages"} <= entry.keys():
        return None
    return (entry["target"] or None) if isinstance(entry["target"], str) else None


def _state(path: Path | None) -> tuple[tuple[str, int, int], ...]:
    """Return names, times and sizes of the files at a path, which change when the files do."""
    if path is None:
        return ()
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    return tuple((str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files)
