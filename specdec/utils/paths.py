"""What a path or hub id may be, said before a library asks the hub for it; and where what was fetched lies."""

from __future__ import annotations

import os
from pathlib import Path


def located(name: str) -> str:
    """What a user means by a name: "~" is the home, and a bare name one of the models that the demo fetched, if it lies
    in the cache."""
    fetched = cache_folder() / name
    if "/" not in name and not Path(name).exists() and (fetched / "config.json").is_file():
        return str(fetched)
    return os.path.expanduser(name)


def require_folder_or_id(name: str | Path) -> None:
    """Raise ValueError for a file, and for what is written like a folder's path and is none."""
    path, written = Path(located(str(name))), str(name)
    if path.is_file():
        raise ValueError(f"{name} is a file: give the folder that holds config.json and the weights")
    if not path.is_dir() and (written.startswith((".", "/", "~")) or written.count("/") > 1):
        raise ValueError(f"{name} is neither a folder with a model nor a hub repository: there is no such folder")


def named(name: str) -> str:
    """One name for a folder, however it was written; a hub id stays."""
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def cache_folder(cache_dir: str | Path | None = None) -> Path:
    """Where fetched models and heads lie: the argument, else $SPECDEC_CACHE, else ~/.cache/specdec."""
    return Path(cache_dir or os.environ.get("SPECDEC_CACHE") or Path.home() / ".cache" / "specdec").expanduser()
