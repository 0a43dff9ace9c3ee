"""Entries: what stands in files of prompts, conversations and texts, one by one, and where each stood.

Owns the kinds of files. What an entry means stands in `conversations`.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

FORMATS = (
    '{"prompt": ..., "response": ...}, {"messages": [{"role": ..., "content": ...}, ...]}, '
    '{"conversations": [{"from": ..., "value": ...}, ...]} or {"text": ...}'
)


def read_entries(data: str | Path | Iterable[Any], formats: str = FORMATS) -> Iterator[tuple[str, Any]]:
    """Entries, and where each stood: of a JSONL file (also gzipped), a plain text (`.txt`, a text between blank lines),
    a folder written by `datasets.Dataset.save_to_disk`, or anything that yields them.

    Args:
        formats: what an error asks for.
    """
    entries: Iterator[tuple[str, Any]]
    if not isinstance(data, (str, Path)):
        name, entries = "the data", ((f"entry {number}", entry) for number, entry in enumerate(data))
    elif Path(data).is_dir():
        name, entries = str(data), _dataset(Path(data))
    elif Path(data).suffix == ".txt":
        parts = Path(data).read_text(encoding="utf-8").split("\n\n")
        name, entries = str(data), ((f"{data}", {"text": part.strip()}) for part in parts if part.strip())
    else:
        name, entries = str(data), _lines(Path(data))
    count = 0
    for count, (place, entry) in enumerate(entries, start=1):  # noqa: B007
        yield place, entry
    if count == 0:
        raise ValueError(f"{name} is empty: one JSON object per line is expected, {formats}")


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    open_file = gzip.open if path.suffix == ".gz" else open
    try:
        with open_file(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path}, line {number}", json.loads(line.rstrip())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {number} is not JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise ValueError(f"{path}, line {number} cannot be read: its JSON is nested too deeply") from error
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        packed = " packed by gzip, as its name says, and whole" if path.suffix == ".gz" else ""
        raise ValueError(f"{path} is not text in UTF-8{packed}: {error}") from error


def _dataset(path: Path) -> Iterator[tuple[str, Any]]:
    if (path / "config.json").exists():
        raise ValueError(f"{path} is a model's folder, not texts: the target comes first, then the texts")
    try:
        from datasets import load_from_disk
    except ImportError as error:
        raise ValueError(f"{path} is a folder, which `pip install datasets` is needed to read") from error
    try:
        rows = load_from_disk(str(path))
    except FileNotFoundError as error:
        raise ValueError(f"{path} is a folder, but none that datasets' save_to_disk wrote") from error
    for number, row in enumerate(rows):
        yield f"{path}, row {number}", row
