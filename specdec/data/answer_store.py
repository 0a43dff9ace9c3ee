"""`Answers`: the JSONL file of answers that `regenerate` writes, and its parts if several processes write.

Each conversation is one line, appended whole. A half-written last line is cut off before a run resumes.
"""

from __future__ import annotations

import glob
import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

BEGINNING = b'{"id": , "target": '  # start of each line, without the number


class Answers:
    """The answer file `out` and the part files next to it.

    Args:
        out: path of the JSONL file.
        share: index of this process and number of processes. A single process writes to `out`. Several write parts,
            which are joined when all conversations are finished.

    Raises:
        ValueError: the name of `out` says that it holds something else than JSON lines.
    """

    def __init__(self, out: Path, share: tuple[int, int] = (0, 1)):
        mine, processes = share
        if out.suffix in (".gz", ".txt"):
            raise ValueError(f"answers are written as JSON lines: choose a name like {out.with_suffix('').stem}.jsonl")
        self.out = out
        self.own_path = out if processes == 1 else out.with_name(f"{out.name}.{mine}.part")
        out.parent.mkdir(parents=True, exist_ok=True)

    def files(self) -> list[Path]:
        """Existing answer files, including parts of runs with another number of processes."""
        return [path for path in (self.out, *self.parts()) if path.exists()]

    def parts(self) -> list[Path]:
        """Part files that are not joined yet."""
        return sorted(self.out.parent.glob(f"{glob.escape(self.out.name)}.[0-9]*.part"))

    def repair(self) -> None:
        """Cut off half-written lines of a killed process. One process calls this while no process writes.

        Call it only after checking that all `entries` belong to this run. A last line that lacks only its newline is
        a complete answer and is kept.
        """
        for path in self.files():
            start, last = 0, b""
            for _, start, last in _lines(path):  # noqa: B007
                pass
            os.truncate(path, start + len(last))
            if last and not last.endswith(b"\n"):
                with path.open("ab") as file:
                    file.write(b"\n")

    def entries(self) -> Iterator[dict[str, Any]]:
        """Yield the entries of all files, each with `id`, `target` and `messages`, without writing anything.

        Raises:
            ValueError: a file contains something other than answers.
        """
        for path in self.files():
            yield from (entry for entry, _, _ in _lines(path))

    def append(self, entry: dict[str, Any]) -> None:
        with self.own_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def join(self) -> None:
        """Join the parts, if any, into one file in the order of the prompts. After a kill it can be repeated."""
        if not self.parts():
            return
        places = {entry["id"]: (path, start) for path in self.files() for entry, start, _ in _lines(path)}
        with tempfile.TemporaryDirectory(dir=self.out.parent) as folder:  # a fixed name could be a user's file
            partial = Path(folder) / self.out.name
            with ExitStack() as stack, partial.open("wb") as joined:
                opened = {path: stack.enter_context(path.open("rb")) for path in self.files()}
                for _, (path, start) in sorted(places.items()):
                    opened[path].seek(start)
                    joined.write(opened[path].readline())
            partial.rename(self.out)
        for path in self.parts():
            path.unlink()


def _lines(path: Path) -> Iterator[tuple[dict[str, Any], int, bytes]]:
    """Yield the entry, byte offset and bytes of each complete line. The last line may lack its newline."""
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
                raise ValueError(f"{path} is not a file of answers: choose another output file")
            yield entry, start, line
            start += len(line)


def _half_written(line: bytes) -> bool:
    """Return whether a line begins like an answer but has no newline."""
    begun = re.sub(rb"\d+", b"", line, count=1)
    return not line.endswith(b"\n") and (begun.startswith(BEGINNING) or BEGINNING.startswith(begun))
