"""Entries: reads files of prompts, conversations and texts entry by entry, with the location of each.

This module parses file formats. `messages` and `conversations` interpret the entries.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO, cast

FORMATS = (
    '{"prompt": ..., "response": ...}, {"messages": [{"role": ..., "content": ...}, ...]}, '
    '{"conversations": [{"from": ..., "value": ...}, ...]} or {"text": ...}'
)


def read_entries(data: str | Path | Iterable[Any], formats: str = FORMATS) -> Iterator[tuple[str, Any]]:
    """Yield the location and the content of each entry.

    Args:
        data: a JSONL file or one JSON array (also gzipped), a `.txt` file with texts separated by blank lines, a folder
            written by `datasets.Dataset.save_to_disk`, or an iterable of entries.
        formats: expected formats, for error messages.

    Raises:
        ValueError: the data is empty or cannot be parsed.
    """
    entries: Iterator[tuple[str, Any]]
    if isinstance(data, dict):
        raise ValueError(f"a dict of {', '.join(map(repr, data))} is not a sequence of entries: give one of its values")
    if not isinstance(data, (str, Path)):
        entry_of = _without_nulls if hasattr(data, "features") else lambda entry: entry
        name, entries = "the data", ((f"entry {number}", entry_of(entry)) for number, entry in enumerate(data))
    elif Path(data).is_dir():
        name, entries = str(data), _dataset(Path(data))
    elif Path(data).suffix == ".txt":
        name, entries = str(data), _paragraphs(Path(data))
    else:
        name, entries = str(data), _array(Path(data)) or _lines(Path(data))
    count = 0
    for count, (place, entry) in enumerate(entries, start=1):  # noqa: B007
        yield place, entry
    if count == 0:
        raise ValueError(f"{name} is empty: one JSON object per line is expected, {formats}")


def cleaned(entry: Any) -> Any:
    """Remove null columns of an entry, and join TRL's `prompt` and `completion` messages into one conversation.

    Raises:
        ValueError: see `check_text`; or `prompt` is a list of messages but `completion` is not.
    """
    if isinstance(entry, dict):
        entry = {name: value for name, value in entry.items() if value is not None}
        if isinstance(entry.get("prompt"), list):
            completion = entry.pop("completion", [])
            if not isinstance(completion, list):
                raise ValueError(f"completion must be a list of messages because prompt is one, got {completion!r}")
            entry["messages"] = [*entry.pop("prompt"), *completion]
    check_text(entry)
    return entry


def check_text(value: Any) -> None:
    """Raise ValueError for a lone surrogate in a string or entry: neither tokenizers nor files can encode it."""
    try:
        json.dumps(value, ensure_ascii=False, default=lambda _: None).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(f"it holds {half!r}, half of a character (a lone surrogate): remove or repair it") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


@contextmanager
def opened(path: Path) -> Iterator[TextIO]:
    """Open a UTF-8 text file, also gzipped; raise ValueError if it turns out to be something else."""
    try:
        open_file = gzip.open if path.suffix == ".gz" else open
        with open_file(path, "rt", encoding="utf-8-sig") as file:
            yield cast(TextIO, file)
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        packed = " in a complete gzip file, as its name says" if path.suffix == ".gz" else ""
        raise ValueError(f"{path} is not text in UTF-8{packed}: {error}") from error


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    with opened(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line.rstrip())
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number} is not JSON: {error.msg} at column {error.colno}") from error
            except RecursionError as error:
                raise ValueError(f"{path}, line {number} cannot be read: its JSON is nested too deeply") from error
            yield f"{path}, line {number}", entry


def _array(path: Path) -> Iterator[tuple[str, Any]] | None:
    """Entries of a file that is one JSON array; None for any other file."""
    with opened(path) as file:
        begun = next((line for line in file if line.strip()), "")
        if not begun.lstrip().startswith("["):
            return None
        file.seek(0)
        try:
            entries = json.loads(file.read())
        except json.JSONDecodeError as error:
            if error.msg == "Extra data":  # more lines follow, so it is JSONL
                return None
            place = f"line {error.lineno} is not JSON: {error.msg} at column {error.colno}"
            raise ValueError(f"{path}, {place}") from error
        except RecursionError:
            return None  # `_lines` reports the line
    return ((f"{path}, entry {number}", entry) for number, entry in enumerate(entries))


def _paragraphs(path: Path) -> Iterator[tuple[str, Any]]:
    with opened(path) as file:
        parts = file.read().split("\n\n")
    number = 1
    for part in parts:
        blank = part[: len(part) - len(part.lstrip())]
        if part.strip():
            yield f"{path}, line {number + blank.count(chr(10))}", {"text": part.strip()}
        number += part.count("\n") + 2


def _dataset(path: Path) -> Iterator[tuple[str, Any]]:
    if (path / "config.json").exists():
        raise ValueError(f"{path} is a model's folder, not texts: give the target first, then the texts")
    try:
        from datasets import load_from_disk
    except ImportError as error:
        raise ValueError(f"{path} is a folder, and reading it needs `pip install datasets`") from error
    try:
        rows = load_from_disk(str(path))
    except FileNotFoundError as error:
        raise ValueError(f"{path} is a folder, but was not written by datasets' save_to_disk") from error
    if isinstance(rows, dict):
        raise ValueError(f"{path} holds the splits {', '.join(rows)}: give one, for example {path / next(iter(rows))}")
    for number, row in enumerate(rows):
        yield f"{path}, row {number}", _without_nulls(row)


def _without_nulls(value: Any) -> Any:
    """Remove the nulls that `datasets` adds so that all objects have the same keys."""
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value
