"""Checkpoints of a run: which one to resume from, and writing one so that a kill leaves none that is damaged.

Imports no torch: a command checks its folder before it loads a model.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

STATE = "trainer_state.json"
WEIGHTS = "model.safetensors"
PICKLED = ("optimizer.pt", "scheduler.pt")  # files of torch.save, which are zip archives
KEPT = 2  # checkpoints that stay
PARTIAL = "unfinished"  # folder in which a checkpoint is written


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the newest one first."""
    found = [path for path in folder.glob("checkpoint-*") if path.name.rpartition("-")[2].isdigit()]
    return sorted(found, key=_update, reverse=True)


def newest_whole(folder: Path) -> Path | None:
    """Return the newest checkpoint that can be read; None if the folder has none.

    A damaged file of a newer one is named in a warning.

    Raises:
        ValueError: there are checkpoints, but none can be read.
    """
    faults: list[str] = []
    for checkpoint in checkpoints(folder):
        fault = fault_of(checkpoint)
        if fault is None:
            if faults:
                warnings.warn(f"{'; '.join(faults)}: the run resumes from the checkpoint before it, {checkpoint}")
            return checkpoint
        faults.append(fault)
    if faults:
        raise ValueError(
            f"{'; '.join(faults)}: no other checkpoint is left to resume from. Remove {folder} to train again from the "
            "first update; the encoded texts and cached states are kept"
        )
    return None


def fault_of(checkpoint: Path) -> str | None:
    """Describe the first file of a checkpoint that is missing or damaged; None if it can be resumed from."""
    random_states = sorted(checkpoint.glob("rng_state*.pth"))
    tests: list[tuple[Path, Callable[[Path], object]]] = [(checkpoint / STATE, _check_state)]
    tests += [(checkpoint / WEIGHTS, _check_weights)]
    tests += [(checkpoint / name, _check_pickled) for name in PICKLED]
    tests += [(path, _check_pickled) for path in random_states or [checkpoint / "rng_state.pth"]]
    for path, test in tests:
        try:
            test(path)
        except FileNotFoundError:
            return f"{path} is missing"
        except Exception as error:
            return f"{path} is damaged ({str(error) or type(error).__name__})"
    return None


def _check_state(path: Path) -> None:
    state = json.loads(path.read_text())
    if not isinstance(state, dict) or "global_step" not in state:
        raise ValueError("it is not the state of a trainer")


def _check_weights(path: Path) -> None:
    from safetensors import safe_open

    path.stat()  # FileNotFoundError, where the library raises its own
    with safe_open(path, "np") as file:  # compares the size of the file with its header
        file.keys()


def _check_pickled(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:  # its directory is at the end, where a truncated file has none
        if (part := archive.testzip()) is not None:
            raise ValueError(f"the checksum of {part} is wrong")


def finish(partial: Path, folder: Path) -> None:
    """Move a written checkpoint to its place, and remove all but the newest `KEPT`.

    Its files are on the disk before it gets its name, so that neither a kill nor a power failure leaves half of it.
    """
    for path in partial.rglob("*"):
        if path.is_file():
            _flush(path)
    place = folder / partial.name
    shutil.rmtree(place, ignore_errors=True)  # a damaged one of the same update
    partial.rename(place)
    for old in checkpoints(folder)[KEPT:]:
        shutil.rmtree(old, ignore_errors=True)


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Replace a file at once. write: writes the new content to the path that it is given."""
    partial = path.with_name(f"{path.name}.part")
    write(partial)
    _flush(partial)
    partial.replace(path)


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _update(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])
