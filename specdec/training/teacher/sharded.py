"""Targets that lie in several processes: in parts of every layer (tensor parallelism), or of every weight (FSDP).

Owns who reads what, and that all make their passes together.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate import PartialState
from accelerate.utils import gather, pad_across_processes
from torch import Tensor

from specdec.data.packed_dataset import PADDING
from specdec.models.lockstep import Step
from specdec.training.teacher.base import LocalTeacher
from specdec.training.teacher.state_extractor import nothing


class TensorParallelTeacher(LocalTeacher):
    """Each process has a part of every layer, so all of them read everybody's texts."""

    together = True

    def _computed(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Of this process' batch; all ask at once, each for as many rows."""
        rows, T = batch["ids"].shape
        mine = PartialState().process_index * rows
        learn = batch["learn"].to(torch.uint8)
        everybodys = super()._computed(
            {
                "ids": _everybodys(batch["ids"], 0),
                "learn": _everybodys(learn, 0),
                "documents": _everybodys(batch["documents"], PADDING),
            }
        )
        return batch | {name: everybodys[name][mine : mine + rows, :T] for name in ("states", "over_all")}


def _everybodys(rows: Tensor, filled_with: int) -> Tensor:
    """(processes * B, longest T) of each process' rows (B, T)."""
    return gather(pad_across_processes(rows, dim=1, pad_index=filled_with))


class FullyShardedTeacher(LocalTeacher):
    """Weights are gathered for each pass, so all processes make as many, each over texts of its own."""

    together = True

    @contextmanager
    def in_step(self) -> Iterator[None]:
        step = Step(self.reader.device)
        self.reader.before_pass = step.before_pass
        yield
        self.reader.before_pass = nothing
        step.wait(self._idle)

    def _idle(self) -> None:
        """A pass for the others' sake."""
        list(self.reader.read([torch.zeros(1, dtype=torch.long)]))

    def _computed(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        with self.in_step():
            return super()._computed(batch)
