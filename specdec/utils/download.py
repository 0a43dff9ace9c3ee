"""Downloads that resume where they stopped. A file gets its name only when it is complete and its checksum is right."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

if TYPE_CHECKING:
    from rich.progress import Progress

BLOCK = 1 << 22
TIMEOUT = 10.0  # seconds without a byte before a connection is given up
TRIES = 5  # connections per file
RETRY_DELAY = 1.0  # seconds between two connections
PARTIAL, RANGE_NOT_SATISFIABLE = 206, 416  # HTTP status: partial content; range not satisfiable


class DownloadFailed(RuntimeError):
    """A file could not be downloaded, or its content is not the expected one."""


@dataclass(frozen=True)
class Content:
    """Expected content of a file.

    Args:
        sha256: SHA-256 in hexadecimal digits.
        size: size in bytes.
    """

    sha256: str
    size: int


def download(
    url: str,
    file: Path,
    content: Content,
    advance: Callable[[int], Any] = lambda size: None,
    deadline: float | None = None,
) -> None:
    """Download a file completely or not at all, resuming an unfinished download of an earlier call.

    Args:
        url: address of the file.
        file: path to write to; it exists only once the download is complete.
        content: expected checksum and size.
        advance: called with each number of bytes received, those of an earlier call first; negative if a server
            starts again from the first byte.
        deadline: time of `time.monotonic` at which to stop; the bytes received until then are kept.

    Raises:
        DownloadFailed: the server cannot be reached, the deadline has passed, or the checksum is wrong.

    Examples:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "served").write_bytes(b"abc")
        >>> content = Content(checksum(folder / "served"), 3)
        >>> download((folder / "served").as_uri(), folder / "downloaded", content)
        >>> (folder / "downloaded").read_bytes()
        b'abc'
    """
    # Named after its checksum, so that another version of the file is not resumed.
    unfinished = file.with_name(f"{file.name}.{content.sha256[:8]}.tmp")
    advance(size_of(unfinished))
    for tries_left in reversed(range(TRIES)):
        try:
            _resume(url, unfinished, content.size, advance, deadline)
            broken = "the connection was interrupted"
        except (OSError, HTTPException) as error:
            broken = str(error) or type(error).__name__
            if isinstance(error, HTTPError) and error.code < 500:
                tries_left = 0
        if size_of(unfinished) >= content.size:
            return verify_and_rename(unfinished, file, content.sha256)
        if tries_left == 0:
            break
        time.sleep(RETRY_DELAY)
    raise DownloadFailed(f"{url} could not be downloaded ({broken})")


def _resume(url: str, unfinished: Path, size: int, advance: Callable[[int], Any], deadline: float | None) -> None:
    """Download the missing bytes, or some of them: a server may close early without an error."""
    begun = size_of(unfinished)
    if begun >= size:
        return
    try:
        answer = urlopen(Request(url, headers={"Range": f"bytes={begun}-"} if begun else {}), timeout=TIMEOUT)
    except HTTPError as error:
        if error.code == RANGE_NOT_SATISFIABLE:
            unfinished.unlink()  # longer than the file: it belongs to another one
        raise
    if begun and answer.status != PARTIAL:  # a server that ignores ranges and sends the whole file
        advance(-begun)
        begun = 0
    with answer, unfinished.open("ab" if begun else "wb") as sink:
        while begun < size and (block := answer.read1(BLOCK)):
            sink.write(block)
            advance(len(block))
            begun += len(block)
            if deadline is not None and time.monotonic() > deadline:
                raise DownloadFailed(f"{url} takes too long: the next call resumes from the bytes received")


def verify_and_rename(unfinished: Path, file: Path, sha256: str) -> None:
    """Rename a downloaded file to its final name if its checksum is right, else delete it.

    Raises:
        DownloadFailed: the checksum is wrong.

    Examples:
        >>> import tempfile
        >>> part, file = (Path(tempfile.mkdtemp()) / name for name in ("a.tmp", "a"))
        >>> _ = part.write_bytes(b"abc")
        >>> verify_and_rename(part, file, checksum(part))
        >>> file.read_bytes()
        b'abc'
    """
    found = checksum(unfinished)
    if found != sha256:
        unfinished.unlink()
        raise DownloadFailed(
            f"{file.name} has the sha256 {found} where {sha256} was expected: it was deleted, try again"
        )
    unfinished.rename(file)


def checksum(file: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    with file.open("rb") as content:
        digest = hashlib.sha256()
        while block := content.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def size_of(file: Path) -> int:
    """Size of a file in bytes; 0 if it does not exist."""
    return file.stat().st_size if file.exists() else 0


def progress_bar() -> Progress:
    """A progress bar for downloads. Writes to standard error: standard output is for a command's result."""
    from rich import progress
    from rich.console import Console

    columns = progress.SpinnerColumn(), progress.TextColumn("{task.description}"), progress.BarColumn()
    more = progress.DownloadColumn(), progress.TimeElapsedColumn()
    return progress.Progress(*columns, *more, console=Console(stderr=True))
