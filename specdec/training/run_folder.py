"""Folder of a training run: the names of its files, the recipe it belongs to, its lock and its finished checkpoints."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

CHECKPOINT_FILES = ("trainer_state.json", "optimizer.pt", "scheduler.pt")
# Command-line options whose names differ from the recipe's fields.
OPTIONS = {"start_from": "--from", "start_from_target": "--from-target"}
CHANGES = {"texts": "its texts differ", "weights": "its target's weights differ"}
DISK_FULL = ("No space left", "inline_container")  # the second is from torch.save's error on a full disk


class RunFolder:
    """Files and folders of a training run.

    Args:
        path: folder of the run.

    Attributes:
        head: the best head.
        transferred: another target's head, transferred to this target as the initial head.
        start: the initial head.
        states: shards of the target's states over the training texts.
        held_out_states: shards of its states over the held-out texts.
        teacher: the rest of the target that training needs (embedding, LM head).
        checkpoints: checkpoints of the trainer.
        training_texts: encoded texts to train on.
        held_out: encoded texts to evaluate on.
        evaluation: results of the evaluations during training.
        curve: plot of loss and acceptance.
    """

    def __init__(self, path: Path):
        self.path = path
        self.head, self.transferred, self.start = path / "head", path / "transferred", path / "start"
        self.states, self.checkpoints = path / "states", path / "run"
        self.held_out_states, self.teacher = self.states / "held_out", self.states / "teacher.safetensors"
        self.training_texts, self.held_out = path / "texts.safetensors", path / "held_out.safetensors"
        self.evaluation, self.curve = path / "evaluation.json", path / "curve.png"
        self._recipe = path / "recipe.json"
        files = [self.training_texts, self.held_out, path / "every_text", self.evaluation, self.curve]
        self._written = [self.head, self.transferred, self.start, self.states, self.checkpoints, *files]
        self._written += [file.with_suffix(".part") for file in files]

    def check(self) -> None:
        """Raise ValueError if a run's results cannot be written here."""
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path} is a file: give a folder for the results")
        if (self.path / "config.json").exists():
            raise ValueError(f"{self.path} is a model's folder: choose another one for the results")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the folder, so that two runs do not overwrite each other's files.

        Raises:
            ValueError: Another run holds the lock.
        """
        try:
            with FileLock(self.path / ".lock", timeout=0):
                yield
        except Timeout as error:
            raise ValueError(f"another run is using {self.path}: wait for it, or choose another folder") from error

    def mark(self) -> None:
        """Mark the folder as a training run's, before anything else is written to it.

        Raises:
            ValueError: The folder is not a training run's and holds files that a run would overwrite.
        """
        if isinstance(read_json(self._recipe), dict):
            return
        lost = [path.name for path in (self._recipe, *self._written) if path.exists()]
        if lost:
            raise ValueError(
                f"{self.path} is not the folder of a training run, which would overwrite files in it "
                f"({', '.join(lost)}): choose another folder"
            )
        self.write_identity({})

    def identity(self) -> dict[str, str] | None:
        """Return the identity of the recipe that used this folder; None if there is none yet."""
        return read_json(self._recipe) or None

    def write_identity(self, mine: Mapping[str, str]) -> None:
        """Write the identity `mine` of the recipe that uses this folder."""
        partial = self.path / ".recipe.part"
        partial.write_text(json.dumps(mine, indent=1))
        partial.replace(self._recipe)

    def check_identity(self, mine: Mapping[str, str], defaults: Mapping[str, str]) -> None:
        """Raise ValueError if this folder belongs to another recipe than the one with the identity `mine`.

        defaults: values assumed for a run that was started before an option existed.
        """
        found = self.identity()
        if not found:
            return
        theirs = {key: value for key, value in defaults.items() if key in mine} | found
        if theirs != mine:
            name = next(key for key in [*mine, *theirs] if theirs.get(key) != mine.get(key))
            change = f"{OPTIONS.get(name, name)} was {theirs.get(name)}, is {mine.get(name)}"
            onward = f" (--from {self.head} continues training its head)" if self.head.exists() else ""
            raise ValueError(
                f"{self.path} holds the work of another recipe ({CHANGES.get(name, change)}): choose another folder"
                f"{onward}"
            )

    def last_checkpoint(self) -> str | None:
        """Return the newest complete checkpoint, if any. The trainer's state is written last."""
        whole = [
            path
            for path in self.checkpoints.glob("checkpoint-*")
            if all((path / name).exists() for name in CHECKPOINT_FILES) and read_json(path / "trainer_state.json")
        ]
        return str(max(whole, key=lambda path: int(path.name.rpartition("-")[2]))) if whole else None

    @contextmanager
    def readable_errors(self, needs_less: str) -> Iterator[None]:
        """Turn out-of-memory and disk-full errors into a ValueError. needs_less: how to run with less memory."""
        kept = f"Finished work is kept in {self.path}. Run the same command again to resume."
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise ValueError(f"out of memory: {needs_less}. {kept}") from error
        except Exception as error:
            full = isinstance(error, OSError) and error.errno == errno.ENOSPC
            if full or any(sign in str(error) for sign in DISK_FULL):
                raise ValueError(f"the disk is full: free some space. {kept}") from error
            if "can't allocate memory" in str(error):  # raised by torch on CPUs
                raise ValueError(f"out of memory: {needs_less}. {kept}") from error
            raise


def read_json(path: Path) -> Any | None:
    """Read a JSON file; None if it is missing or incomplete."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError, RecursionError):
        return None
