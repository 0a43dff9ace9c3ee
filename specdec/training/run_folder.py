"""Folder of a training run: the names of its files, the recipe it belongs to, and its lock.

Imports no torch: a command checks its folder before it loads a model.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specdec.training.checkpoints import newest_whole
from specdec.utils.paths import check_writable, lasting_files, locked

# Command-line options whose names differ from the recipe's fields.
OPTIONS = {"start_from": "--from", "start_from_target": "--from-target"}
ALWAYS_RECORDED = ("target", "texts")  # fields of every identity, of earlier versions too
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
        self._recipe, self._partial_recipe = path / "recipe.json", path / ".recipe.part"

    def check(self) -> None:
        """Raise ValueError if a run's results cannot be written here, or would be mixed with files of others."""
        check_writable(self.path, folder=True)
        if not self.path.exists():
            return
        if (self.path / "config.json").exists():
            raise ValueError(f"{self.path} is a model's folder: choose another one for the results")
        # Listed before the recipe is read: another process may mark the folder in between.
        found = [name for name in lasting_files(self.path) if name != self._partial_recipe.name]
        if found and self._marked() is None:
            raise ValueError(
                f"{self.path} holds other files ({shortened(found)}) and is not the folder of a training run: choose "
                f"another folder, such as {self.path / 'training'}"
            )

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the folder, so that two runs do not overwrite each other's files.

        Raises:
            ValueError: Another run holds the lock.
        """
        with locked(self.path / ".lock", self.path):
            yield

    def mark(self) -> None:
        """Mark the folder as a training run's, before anything else is written to it.

        Raises:
            ValueError: The folder is not a training run's and holds files of others.
        """
        self.check()
        if self._marked() is None:
            self.write_identity({})

    def identity(self) -> dict[str, str] | None:
        """Return the identity of the recipe that used this folder; None if there is none yet."""
        return self._marked() or None

    def _marked(self) -> dict[str, str] | None:
        """Return the content of a run's `recipe.json`; None if there is none, or if it is another program's."""
        found = read_json(self._recipe)
        ours = isinstance(found, dict) and (not found or found.keys() >= set(ALWAYS_RECORDED))
        return found if ours else None

    def write_identity(self, mine: Mapping[str, str]) -> None:
        """Write the identity `mine` of the recipe that uses this folder."""
        self._partial_recipe.write_text(json.dumps(mine, indent=1))
        self._partial_recipe.replace(self._recipe)

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
            was, now = (recipe.get(name, "not recorded") for recipe in (theirs, mine))
            change = f"{OPTIONS.get(name, name)} was {was}, is {now}"
            onward = f" (--from {self.head} continues training its head)" if self.head.exists() else ""
            changed_defaults = {"optimizer": "--optimizer", "draft_vocab": "--draft-vocab"}
            same = f", or resume with {changed_defaults[name]} {was}" if name in changed_defaults else ""
            raise ValueError(
                f"{self.path} holds the work of another recipe ({CHANGES.get(name, change)}): choose another folder"
                f"{onward}{same}"
            )

    def last_checkpoint(self) -> str | None:
        """Return the newest checkpoint that can be read, if any, see `newest_whole`."""
        found = newest_whole(self.checkpoints)
        return None if found is None else str(found)

    @contextmanager
    def readable_errors(self, needs_less: str) -> Iterator[None]:
        """Turn out-of-memory and disk-full errors into a ValueError. needs_less: how to run with less memory."""
        import torch

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


def shortened(names: list[str], most: int = 3) -> str:
    """Format a list of names, of which only the first few are given."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def read_json(path: Path) -> Any | None:
    """Read a JSON file; None if it is missing or incomplete."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError, RecursionError):
        return None
