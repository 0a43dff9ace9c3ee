"""`RunFolder`: the folder of a training run: whose work it holds, who is at work in it, and what of it is finished.

Owns the names of what lies there. Knows nothing of how any of it is made.
"""

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
# Of the command line, where it calls them otherwise.
OPTIONS = {"start_from": "--from", "start_from_target": "--from-target"}
CHANGES = {"texts": "on other texts", "weights": "the target's weights were others"}
DISK_FULL = ("No space left", "inline_container")  # the second is what torch.save says of a file it cannot fill


class RunFolder:
    """What lies in `path`, by its name.

    Attributes:
        head: the best one. transferred: another target's, made into one to begin with. start: what was begun with.
        states: the target's, in shards; held_out_states: those of texts to evaluate on. teacher: what else is needed
            of it beside them.
        checkpoints: of the training. learnt, held_out: texts. evaluation, curve: of heads while they are trained.
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
        """Raise ValueError where a run's results cannot go."""
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path} is a file: give a folder for the results")
        if (self.path / "config.json").exists():
            raise ValueError(f"{self.path} is a model's folder: choose another one for the results")

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Two runs in one folder would overwrite each other's work."""
        try:
            with FileLock(self.path / ".lock", timeout=0):
                yield
        except Timeout as error:
            raise ValueError(f"another run is at work in {self.path}: wait for it, or choose another folder") from error

    def take(self) -> None:
        """Make the folder a training's, before anything else is written to it.

        Raises:
            ValueError: it is no training's, and holds what a training would write over.
        """
        if isinstance(read_json(self._recipe), dict):
            return
        lost = [path.name for path in (self._recipe, *self._written) if path.exists()]
        if lost:
            raise ValueError(
                f"{self.path} was not begun by a training, which would write over what it holds ({', '.join(lost)}): "
                "choose another folder"
            )
        self.claim({})

    def identity(self) -> dict[str, str] | None:
        """Of the recipe that was at work here; None if there was none, or it did not come to its target."""
        return read_json(self._recipe) or None

    def claim(self, mine: Mapping[str, str]) -> None:
        """Write down whose work lies here."""
        partial = self.path / ".recipe.part"
        partial.write_text(json.dumps(mine, indent=1))
        partial.replace(self._recipe)

    def refuse_others(self, mine: Mapping[str, str], defaults: Mapping[str, str]) -> None:
        """Raise ValueError if the states and checkpoints that lie here are of a recipe other than `mine`.

        Args:
            defaults: what holds for a run of before an option was there.
        """
        found = self.identity()
        if not found:
            return
        theirs = {key: value for key, value in defaults.items() if key in mine} | found
        if theirs != mine:
            name = next(key for key in [*mine, *theirs] if theirs.get(key) != mine.get(key))
            change = f"{OPTIONS.get(name, name)} was {theirs.get(name)}, is {mine.get(name)}"
            onward = f" (--from {self.head} goes on from its head)" if self.head.exists() else ""
            raise ValueError(
                f"{self.path} holds the work of another recipe ({CHANGES.get(name, change)}): choose another folder"
                f"{onward}"
            )

    def last_checkpoint(self) -> str | None:
        """The newest that was written to its end; the trainer's state is what is written last."""
        whole = [
            path
            for path in self.checkpoints.glob("checkpoint-*")
            if all((path / name).exists() for name in CHECKPOINT_FILES) and read_json(path / "trainer_state.json")
        ]
        return str(max(whole, key=lambda path: int(path.name.rpartition("-")[2]))) if whole else None

    @contextmanager
    def clear_failures(self, needs_less: str) -> Iterator[None]:
        """What can go wrong for want of room, in words, with what needs less memory; what was saved before is kept."""
        kept = f"What was finished is kept in {self.path}; the same command goes on from there."
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise ValueError(f"out of memory: {needs_less}. {kept}") from error
        except Exception as error:
            full = isinstance(error, OSError) and error.errno == errno.ENOSPC
            if full or any(sign in str(error) for sign in DISK_FULL):
                raise ValueError(f"the disk is full. Make room. {kept}") from error
            if "can't allocate memory" in str(error):  # of CPUs
                raise ValueError(f"out of memory: {needs_less}. {kept}") from error
            raise


def read_json(path: Path) -> Any | None:
    """What is in a file; None if there is none, or it was not written to its end."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError, RecursionError):
        return None
