"""Check paths and hub ids before a library asks the hub for them, and find the folder of downloaded models."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Files of systems and tools, and of our own locks: a folder with nothing else counts as empty.
HARMLESS = (".DS_Store", "Thumbs.db", "desktop.ini", ".directory", ".gitkeep", ".gitignore", "lost+found", ".lock")


def located(name: str) -> str:
    """The path of a model: "~" is expanded, and a name without "/" finds a model that the demo has downloaded.

    Examples:
        >>> located("Qwen/Qwen3-0.6B")
        'Qwen/Qwen3-0.6B'
    """
    fetched = cache_folder() / name
    if "/" not in name and not Path(name).exists() and (fetched / "config.json").is_file():
        return str(fetched)
    return os.path.expanduser(name)


def require_folder_or_id(name: str | Path) -> None:
    """Raise ValueError for a file, and for a name that looks like a path to a folder that does not exist.

    Examples:
        >>> require_folder_or_id("Qwen/Qwen3-0.6B")
        >>> require_folder_or_id("./no such folder")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: ./no such folder is neither a folder with a model nor a hub repository: ...
    """
    path, written = Path(located(str(name))), str(name)
    if path.is_file():
        raise ValueError(f"{name} is a file: give the folder that holds config.json and the weights")
    if not path.is_dir() and (written.startswith((".", "/", "~")) or written.count("/") > 1):
        raise ValueError(f"{name} is neither a folder with a model nor a hub repository: there is no such folder")


def named(name: str) -> str:
    """The absolute path of a folder, so that each folder has one name; a hub id is returned unchanged.

    Examples:
        >>> named(".") == str(Path.cwd())
        True
        >>> named("Qwen/Qwen3-0.6B")
        'Qwen/Qwen3-0.6B'
    """
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def cache_folder(cache_dir: str | Path | None = None) -> Path:
    """The folder of downloaded models and heads: the argument, else $SPECDEC_CACHE, else ~/.cache/specdec.

    Examples:
        >>> cache_folder("/tmp/models").as_posix()
        '/tmp/models'
    """
    return Path(cache_dir or os.environ.get("SPECDEC_CACHE") or Path.home() / ".cache" / "specdec").expanduser()


def lasting_files(folder: str | Path) -> list[str]:
    """The names in a folder that somebody would miss, sorted. Files of systems (`HARMLESS`) are left out.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     for name in (".DS_Store", "notes.txt"):
        ...         Path(folder, name).touch()
        ...     lasting_files(folder)
        ['notes.txt']
    """
    names = (path.name for path in Path(folder).iterdir())
    return sorted(name for name in names if name not in HARMLESS and not name.startswith(("._", ".nfs")))


@contextmanager
def locked(lock: Path, used: Path) -> Iterator[None]:
    """Hold the lock file of something that two runs must not write at once.

    Raises:
        ValueError: another run holds it.
    """
    from filelock import FileLock, Timeout

    held = FileLock(lock, timeout=0)
    try:
        held.acquire()
    except Timeout as error:
        raise ValueError(f"another run is using {used}: wait for it, or choose another one") from error
    try:
        yield
    finally:
        with suppress(OSError):  # Windows removes no open file
            lock.unlink()
        held.release()


def check_writable(path: str | Path, folder: bool = False) -> None:
    """Raise ValueError if a file, or a folder, cannot be created or written at a path.

    Examples:
        >>> check_writable("a new folder/answers.jsonl")
        >>> check_writable(".")
        Traceback (most recent call last):
        ...
        ValueError: . is a folder: give a file
    """
    path = Path(path)
    if path.exists() and path.is_dir() != folder:
        raise ValueError(f"{path} is a {'file: give a folder' if folder else 'folder: give a file'}")
    place = path
    while not place.exists() and place != place.parent:
        place = place.parent
    if place != path and not place.is_dir():
        raise ValueError(f"{path} cannot be created: {place} is a file, not a folder")
    if not os.access(place, os.W_OK):
        raise ValueError(f"{path} cannot be written: no permission to write to {place}")
