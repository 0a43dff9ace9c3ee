"""Check paths and hub ids before a library asks the hub for them, and find the folder of downloaded models."""

from __future__ import annotations

import os
from pathlib import Path


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
