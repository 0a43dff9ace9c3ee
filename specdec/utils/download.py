"""Files from elsewhere: a download that goes on where it stopped, and what carries its name only when it is whole.

Owns checksums, unfinished files and the bar that shows how far one is. Knows nothing of what a file is for.
"""

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
SILENCE = 10.0  # seconds without a byte
TRIES = 5  # connections for one file
AGAIN_IN = 1.0  # seconds
PARTIAL, NOTHING_LEFT = 206, 416  # of HTTP: the file from some byte on; it has none behind that byte


class DownloadFailed(RuntimeError):
    """A file could not be had, or is not what it should be."""


@dataclass(frozen=True)
class Content:
    """What a file should be. size: bytes."""

    sha256: str
    size: int


def download(
    url: str,
    file: Path,
    content: Content,
    advance: Callable[[int], Any] = lambda size: None,
    deadline: float | None = None,
) -> None:
    """Bring a file here, whole or not at all; what an earlier call left unfinished is gone on from.

    Args:
        advance: told how many bytes came, those of an earlier call first.
        deadline: by `time.monotonic`: what came until then is kept.
    """
    # By its checksum, so that another version of the file is not gone on from.
    unfinished = file.with_name(f"{file.name}.{content.sha256[:8]}.tmp")
    advance(size_of(unfinished))
    for tries_left in reversed(range(TRIES)):
        try:
            _go_on(url, unfinished, content.size, advance, deadline)
            broken = "it broke off"
        except (OSError, HTTPException) as error:
            broken = str(error) or type(error).__name__
            if isinstance(error, HTTPError) and error.code < 500:
                tries_left = 0
        if size_of(unfinished) >= content.size:
            return settle(unfinished, file, content.sha256)
        if tries_left == 0:
            break
        time.sleep(AGAIN_IN)
    raise DownloadFailed(f"{url} could not be downloaded ({broken})")


def _go_on(url: str, unfinished: Path, size: int, advance: Callable[[int], Any], deadline: float | None) -> None:
    """Download what is missing, or some of it: a server may close early without an error."""
    begun = size_of(unfinished)
    if begun >= size:
        return
    try:
        answer = urlopen(Request(url, headers={"Range": f"bytes={begun}-"} if begun else {}), timeout=SILENCE)
    except HTTPError as error:
        if error.code == NOTHING_LEFT:
            unfinished.unlink()  # of another file
        raise
    if begun and answer.status != PARTIAL:  # a server that sends whole files alone
        advance(-begun)
        begun = 0
    with answer, unfinished.open("ab" if begun else "wb") as sink:
        while begun < size and (block := answer.read1(BLOCK)):
            sink.write(block)
            advance(len(block))
            begun += len(block)
            if deadline is not None and time.monotonic() > deadline:
                raise DownloadFailed(f"{url} takes too long: the next call goes on from what came")


def settle(unfinished: Path, file: Path, sha256: str) -> None:
    """Give a file its name if its checksum is right; or else delete it."""
    found = checksum(unfinished)
    if found != sha256:
        unfinished.unlink()
        raise DownloadFailed(f"{file.name} has the sha256 {found} where {sha256} was expected: it was deleted")
    unfinished.rename(file)


def checksum(file: Path) -> str:
    """SHA-256, in hexadecimal digits."""
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while block := content.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def size_of(file: Path) -> int:
    """In bytes; 0 of a file that is not there."""
    return file.stat().st_size if file.exists() else 0


def progress_bar() -> Progress:
    """On standard error: standard output is for what was asked for."""
    from rich import progress
    from rich.console import Console

    columns = (progress.SpinnerColumn(), progress.TextColumn("{task.description}"), progress.BarColumn())
    more = (progress.DownloadColumn(), progress.TimeElapsedColumn())
    return progress.Progress(*columns, *more, console=Console(stderr=True))
