"""`Answers`: the file of answers that `regenerate` writes, and the parts of it that several processes write.

Owns the lines: one per conversation, appended whole. A half-written one is cut off. Knows nothing of models.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HALF_WRITTEN = b'{"id": '  # how our lines begin


class Answers:
    """What lies at `out`, and beside it.

    Args:
        share: which of so many processes this is. One alone writes into `out`, several into parts, which are joined
            when all conversations are over.
    """

    def __init__(self, out: Path, share: tuple[int, int] = (0, 1)):
        mine, processes = share
        self.out = out
        self.own = out if processes == 1 else out.with_name(f"{out.name}.{mine}.part")
        out.parent.mkdir(parents=True, exist_ok=True)

    def files(self) -> list[Path]:
        """Also of runs by another number of processes."""
        return [path for path in (self.out, *self.parts()) if path.exists()]

    def parts(self) -> list[Path]:
        """What several processes have written, and nobody joined yet."""
        return sorted(self.out.parent.glob(f"{self.out.name}.*.part"))

    def mend(self) -> None:
        """Cut off what a killed process left half-written; of several one does so, while none writes.

        Raises:
            ValueError: a file that is not of answers.
        """
        for path in self.files():
            whole = sum(len(line) for _, _, line in _lines(path))
            os.truncate(path, whole)

    def entries(self) -> Iterator[dict[str, Any]]:
        """Of all files; `id`, `target` and `messages` are in each."""
        for path in self.files():
            for entry, _, _ in _lines(path):
                yield entry

    def append(self, entry: dict[str, Any]) -> None:
        with self.own.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def join(self) -> None:
        """Make one file of the parts, if there are any, in the order of the prompts. Killed, it can be done again."""
        if not self.parts():
            return
        files, places = self.files(), {}
        for number, path in enumerate(files):
            for entry, start, _ in _lines(path):
                places[entry["id"]] = (number, start)
        partial = self.out.with_name(f"{self.out.name}.joined")
        opened = [path.open("rb") for path in files]
        with partial.open("wb") as joined:
            for _, (number, start) in sorted(places.items()):
                opened[number].seek(start)
                joined.write(opened[number].readline())
        for file in opened:
            file.close()
        partial.rename(self.out)
        for path in self.parts():
            path.unlink()


def _lines(path: Path) -> Iterator[tuple[dict[str, Any], int, bytes]]:
    """Each whole line: its entry, where it starts, and itself."""
    start = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n") and line.startswith(HALF_WRITTEN[: len(line)]):
                return
            try:
                entry = json.loads(line)
                entry["id"], [message["role"] for message in entry["messages"]]
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise ValueError(f"{path} is not a file of answers: choose another name") from error
            yield entry, start, line
            start += len(line)
