"""Teachers for targets sharded over several processes: by parts of layers (tensor parallelism) or by weights (FSDP).

All processes must run the target's passes together.
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
    """Teacher for tensor parallelism: each process has a part of every layer, so each reads the texts of all."""

    collective = True

    def _computed(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Compute the states of this process's batch. All processes call this together, with equally many rows."""
        rows, T = batch["ids"].shape
        mine = PartialState().process_index * rows
        learn = batch["learn"].to(torch.uint8)
        everybodys = super()._computed(
            {
                "ids": _gathered(batch["ids"], 0),
                "learn": _gathered(learn, 0),
                "documents": _gathered(batch["documents"], PADDING),
            }
        )
        return batch | {name: everybodys[name][mine : mine + rows, :T] for name in ("states", "over_all")}


def _gathered(rows: Tensor, filled_with: int) -> Tensor:
    """Gather the rows (B, T) of all processes as (processes * B, longest T)."""
    return gather(pad_across_processes(rows, dim=1, pad_index=filled_with))


class FullyShardedTeacher(LocalTeacher):
    """Teacher for FSDP: weights are gathered for each pass, so all processes run equally many, over different texts."""

    collective = True

    @contextmanager
    def lockstep(self) -> Iterator[None]:
        step = Step(self.reader.device)
        self.reader.before_pass = step.before_pass
        yield
        self.reader.before_pass = nothing
        step.wait(self._idle)

    def _idle(self) -> None:
        """Run a dummy pass, because other processes still run theirs."""
        list(self.reader.read([torch.zeros(1, dtype=torch.long)]))

    def _computed(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        with self.lockstep():
            return super()._computed(batch)
