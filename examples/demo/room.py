"""Check that free disk space and available memory suffice for a model."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from specdec.models.hardware import available_memory


class NoRoom(RuntimeError):
    """Raised if disk space or memory does not suffice."""


def require(what: str, folder: Path, disk: int, memory: int, more_remedies: Sequence[str] = ()) -> None:
    """Raise `NoRoom` unless `disk` bytes are free on the disk of `folder` and `memory` bytes are available."""
    shortages: list[str] = []
    remedies: list[str] = []
    free = free_disk(folder)
    if free < disk:
        shortages.append(f"{_gb(disk)} of disk at {folder}, where {_gb(free)} are free ({_missing(disk - free)})")
        remedies.append("free some space or set SPECDEC_CACHE to a folder on a larger disk")
    available = available_memory()
    if available is not None and available < memory:
        shortages.append(f"{_gb(memory)} of memory, {_gb(available)} are available ({_missing(memory - available)})")
        remedies.append("close other programs")
    if shortages:
        advice = "; or ".join([*remedies, *more_remedies])
        raise NoRoom(f"not enough space for {what}: it needs {' and '.join(shortages)}. Please {advice}.")


def free_disk(folder: Path) -> int:
    """Free bytes on the file system of `folder`, which need not exist yet."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def size_of(folder: Path) -> int:
    """Total bytes of all files in `folder`; 0 if it does not exist."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _missing(size: int) -> str:
    """Format missing bytes, rounded up so that they never show as zero."""
    return f"{_gb(-(-size // 10**8) * 10**8)} missing"


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
