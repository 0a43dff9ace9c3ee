"""`Answers`: the file of answers that `regenerate` writes, and the parts of it that several processes write.

Owns the lines: one per conversation, appended whole. A half-written one is cut off. Knows nothing of models.
"""

from __future__ import annotations

import glob
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BEGINNING = b'{"id": , "target": '  # of our lines, without the number


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
        return sorted(self.out.parent.glob(f"{glob.escape(self.out.name)}.[0-9]*.part"))

    def mend(self) -> None:
        """Cut off what a killed process left half-written; of several one does so, while none writes.

        Call it only after all `entries` were found to be this run's: a last line that lacks nothing but its end is
        somebody's answer, too, and is kept.
        """
        for path in self.files():
            end, last = 0, b"\n"
            for _, start, last in _lines(path):
                end = start + len(last)
            os.truncate(path, end)
            if not last.endswith(b"\n"):
                with path.open("ab") as file:
                    file.write(b"\n")

    def entries(self) -> Iterator[dict[str, Any]]:
        """Entries of all files, each with `id`, `target` and `messages`. Nothing is written.

        Raises:
            ValueError: a file that is not of answers.
        """
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
        opened = [path.open("rb") for path in files]
        with tempfile.TemporaryDirectory(dir=self.out.parent) as own:  # a name of ours might be somebody's file
            partial = Path(own) / self.out.name
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
    """Each whole line: its entry, where it starts, and itself; the last one may lack its end."""
    start = 0
    with path.open("rb") as file:
        for line in file:
            try:
                entry = json.loads(line)
                known = isinstance(entry["id"], int) and "target" in entry
                [message["role"] for message in entry["messages"]]
            except (ValueError, KeyError, TypeError, RecursionError):
                if _half_written(line):
                    return
                known = False
            if not known:
                raise ValueError(f"{path} is not a file of answers: choose another name")
            yield entry, start, line
            start += len(line)


def _half_written(line: bytes) -> bool:
    """Whether a line begins as ours do, and has no end."""
    begun = re.sub(rb"\d+", b"", line, count=1)
    return not line.endswith(b"\n") and (begun.startswith(BEGINNING) or BEGINNING.startswith(begun))
