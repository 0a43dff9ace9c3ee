"""Files of the heads that specdec ships: the folders that may hold them, and their download.

`$SPECDEC_HEADS` sets another source, or turns downloads off. `registry` says which head belongs to which target.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution, metadata
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import url2pathname

from filelock import FileLock, Timeout
from huggingface_hub import is_offline_mode
from huggingface_hub.utils import are_progress_bars_disabled

from specdec.utils.download import Content, DownloadFailed, download, progress_bar
from specdec.utils.paths import cache_folder

SOURCE = "SPECDEC_HEADS"  # a folder or URL that has HEAD/FILE and replaces the release page; or OFF
OFF = "off"
DISTRIBUTION = "specdec-hf"


def head_folders() -> list[Path]:
    """Return the folders that may hold shipped heads: the checkout's, the user's own, the cache's."""
    own = [Path(_source()).expanduser()] if _is_folder(_source()) else []
    checkouts = [Path(__file__).resolve().parents[2], *_installed_from()]
    return [*(checkout / "heads" for checkout in checkouts), *own, cache_folder() / "heads"]


def folder_of(head: str, file: str) -> Path | None:
    """Return the head's folder if this file is in it, else None."""
    return next((place / head for place in head_folders() if (place / head / file).exists()), None)


def download_head(head: str, files: Mapping[str, Content], patience: float | None = None) -> Path:
    """Download a head into the cache, all its files or none, and return its folder.

    If several processes call this, one downloads. patience: time limit in seconds. None waits as long as bytes arrive.

    Raises:
        DownloadFailed: the download failed. The message holds only the reason.
    """
    address, place = _address(), cache_folder() / "heads"
    try:
        place.mkdir(parents=True, exist_ok=True)
        with FileLock(place / f".{head}.lock", timeout=-1 if patience is None else patience):
            if not (place / head).exists():  # otherwise another process has downloaded it
                _download_into(place, head, f"{address}/{head}", files, patience)
    except Timeout as error:
        raise DownloadFailed("another process is downloading it") from error
    except OSError as error:
        raise DownloadFailed(f"it cannot be stored in {place} ({error})") from error
    return place / head


def _download_into(place: Path, head: str, address: str, files: Mapping[str, Content], patience: float | None) -> None:
    work = place / f"{head}.partial"
    work.mkdir(exist_ok=True)
    deadline = None if patience is None else time.monotonic() + patience
    with progress_bar() as bar:
        bar.disable = are_progress_bars_disabled()
        task = bar.add_task(f"downloading the head {head}", total=sum(content.size for content in files.values()))
        for name, content in files.items():
            if (work / name).exists():  # a file gets its final name once its checksum has matched
                bar.advance(task, content.size)
            else:
                download(f"{address}/{name}", work / name, content, lambda size: bar.advance(task, size), deadline)
    work.rename(place / head)


def _address() -> str:
    """Return the URL that HEAD/FILE is relative to. Raises DownloadFailed if downloads are off."""
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


def _installed_from() -> list[Path]:
    """Return the checkout given to `pip install PATH`, as recorded by pip (PEP 610); [] for other installations."""
    with suppress(PackageNotFoundError):
        recorded = urlparse(json.loads(distribution(DISTRIBUTION).read_text("direct_url.json") or "{}").get("url", ""))
        if recorded.scheme == "file":
            return [Path(url2pathname(recorded.path))]
    return []


def _source() -> str:
    return os.environ.get(SOURCE, "")


def _is_folder(source: str) -> bool:
    return source not in ("", OFF) and not source.startswith(("https://", "http://"))


def _releases() -> str:
    """Return the release page of the repository named in pyproject.toml, with a release per head, or ""."""
    with suppress(PackageNotFoundError):  # specdec runs from a checkout without being installed
        for link in metadata(DISTRIBUTION).get_all("Project-URL") or ():
            kind, _, address = link.partition(", ")
            if kind == "Repository":
                return f"{address}/releases/download"
    return ""
