"""The heads that specdec ships, as files: the folders that may hold them, and how one gets there.

Owns `$SPECDEC_HEADS`, and where heads are downloaded from. Which head is whose stands in `registry`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

from filelock import FileLock, Timeout
from huggingface_hub import is_offline_mode
from huggingface_hub.utils import are_progress_bars_disabled

from specdec.utils.download import Content, DownloadFailed, download, progress_bar
from specdec.utils.paths import cache_folder

SOURCE = "SPECDEC_HEADS"  # a folder or an address that has HEAD/FILE, in place of the release page; or OFF
OFF = "off"
DISTRIBUTION = "specdec-hf"


def head_folders() -> list[Path]:
    """Folders that may hold our heads: of a checkout, the user's own, the cache."""
    own = [Path(_source()).expanduser()] if _is_folder(_source()) else []
    return [Path(__file__).resolve().parents[2] / "heads", *own, cache_folder() / "heads"]


def folder_of(head: str, file: str) -> Path | None:
    """The head's folder, if this file is in it."""
    return next((place / head for place in head_folders() if (place / head / file).exists()), None)


def bring(head: str, files: Mapping[str, Content], patience: float | None = None) -> Path:
    """Download a head into the cache, all its files or none. Of several processes one does.

    Args:
        patience: seconds; None: as long as bytes come.

    Raises:
        DownloadFailed: with the reason alone.
    """
    address, place = _address(), cache_folder() / "heads"
    try:
        place.mkdir(parents=True, exist_ok=True)
        with FileLock(place / f".{head}.lock", timeout=-1 if patience is None else patience):
            if not (place / head).exists():  # else another process brought it
                _bring_into(place, head, f"{address}/{head}", files, patience)
    except Timeout as error:
        raise DownloadFailed("another process is downloading it") from error
    except OSError as error:
        raise DownloadFailed(f"it cannot be kept in {place} ({error})") from error
    return place / head


def _bring_into(place: Path, head: str, address: str, files: Mapping[str, Content], patience: float | None) -> None:
    work = place / f"{head}.partial"
    work.mkdir(exist_ok=True)
    deadline = None if patience is None else time.monotonic() + patience
    with progress_bar() as bar:
        bar.disable = are_progress_bars_disabled()
        task = bar.add_task(f"downloading the head {head}", total=sum(content.size for content in files.values()))
        for name, content in files.items():
            if (work / name).exists():  # it has its name since its checksum was right
                bar.advance(task, content.size)
            else:
                download(f"{address}/{name}", work / name, content, lambda size: bar.advance(task, size), deadline)
    work.rename(place / head)


def _address() -> str:
    """Under which HEAD/FILE is found; DownloadFailed if nothing is to be downloaded."""
    if is_offline_mode():
        raise DownloadFailed("HF_HUB_OFFLINE is set, so nothing is downloaded")
    if _source() == OFF:
        raise DownloadFailed(f"{SOURCE} is {OFF}, so it is not downloaded")
    if _is_folder(_source()):
        raise DownloadFailed(f"{SOURCE} is the folder {_source()}, which does not have it")
    address = _source() or _releases()
    if not address:
        raise DownloadFailed("this installation of specdec names no release page to download it from")
    return address.rstrip("/")


def _source() -> str:
    return os.environ.get(SOURCE, "")


def _is_folder(source: str) -> bool:
    return source not in ("", OFF) and not source.startswith(("https://", "http://"))


def _releases() -> str:
    """Of the repository that pyproject.toml names, a release for each head; "" if it names none."""
    with suppress(PackageNotFoundError):  # files beside nothing that was installed
        for link in metadata(DISTRIBUTION).get_all("Project-URL") or ():
            kind, _, address = link.partition(", ")
            if kind == "Repository":
                return f"{address}/releases/download"
    return ""
