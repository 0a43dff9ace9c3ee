"""Whether the machine has room for a model: free disk, available memory, and one clear error where it has not."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from specdec.models.hardware import available_memory


class NoRoom(RuntimeError):
    """Disk or memory do not suffice."""


def require(what: str, folder: Path, disk: int, memory: int, more_remedies: Sequence[str] = ()) -> None:
    """Raise `NoRoom` unless `disk` bytes are free where `folder` lies (or will lie) and `memory` bytes available."""
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
        raise NoRoom(f"no room for {what}: it takes {' and '.join(shortages)}. Please {advice}.")


def free_disk(folder: Path) -> int:
    """Bytes free on the file system of `folder`, which need not exist yet."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def size_of(folder: Path) -> int:
    """Bytes of all files in `folder`; 0 if there is none."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _missing(size: int) -> str:
    """Rounded up: what is missing is never nothing."""
    return f"{_gb(-(-size // 10**8) * 10**8)} missing"


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
