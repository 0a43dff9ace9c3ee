"""`Outline`: a head that has shapes and no numbers: how large it is, what a pass of its training computes and keeps.

Its modules lie on torch's meta device, its passes are made with torch's fake tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from specdec.heads.dflash.config import DFlashConfig
from specdec.heads.dflash.head import DFlashHead
from specdec.heads.eagle3.config import Eagle3Config
from specdec.heads.eagle3.head import Eagle3Head
from specdec.heads.kinds import StandAlone
from specdec.training.objectives.block_unroll import unroll_rows
from specdec.training.objectives.unroll import unroll
from specdec.training.optimizer import matrices

META = torch.device("meta")


@dataclass(frozen=True)
class Outline:
    """A head in training.

    Args:
        taps: of the target's states that it reads. length: T, tokens per row. drafted: of a pass, or of so many passes.
        anchors: tokens of a row that a drafter of blocks learns to draft behind. device: that is planned for.
    """

    config: Eagle3Config | DFlashConfig
    taps: int
    length: int
    drafted: int
    anchors: int
    device: torch.device

    @cached_property
    def weights(self) -> int:
        with META:
            return parameters(self._head())

    @cached_property
    def matrices(self) -> int:
        """Numbers in the weights that are Muon's."""
        with META:
            return sum(weight.numel() for weight in matrices(self._head()))

    @property
    def estimates_per_row(self) -> int:
        """Tokens of a row that drafts are learnt behind, at most: all, or the anchors."""
        every = self.length - 2
        return min(self.anchors, every) if isinstance(self.config, DFlashConfig) else every

    @property
    def width(self) -> int:
        """W, of what the LM head reads: with a Markov head its embeddings, too."""
        return self.config.hidden_size + (self.config.markov_rank if isinstance(self.config, DFlashConfig) else 0)

    def kept_for_gradients(self, rows: int) -> int:
        """Bytes that a pass over so many rows keeps, if every token is learnt."""
        kept: dict[int, torch.UntypedStorage] = {}  # held, or its number would be given to another

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if not isinstance(tensor, torch.nn.Parameter):
                kept[storage._cdata] = storage
            return tensor

        with FakeTensorMode(), saved_tensors_hooks(keep, lambda tensor: tensor):
            drafts = self._unrolled(rows)
        gradient = 4 * drafts.numel()  # the loss computes it on the way
        return sum(storage.nbytes() for storage in kept.values()) + gradient

    def forward_work(self) -> int:
        """Floating-point operations over one row, all its steps, logits aside."""
        with FakeTensorMode(), FlopCounterMode(display=False) as counter, torch.no_grad():
            self._unrolled(1)
        return counter.get_total_flops()

    def _head(self) -> StandAlone:
        return DFlashHead(self.config) if isinstance(self.config, DFlashConfig) else Eagle3Head(self.config)

    def _unrolled(self, rows: int) -> Tensor:
        """What the LM head reads of all drafts, (rows, n, W)."""
        T, wide = self.length, self.taps * self.config.target_hidden_size
        with self.device:
            head = self._head()
            head.bring_frequencies()
            ids, states = torch.zeros(rows, T, dtype=torch.long), torch.empty(rows, T, wide)
            steps = min(self.drafted, T - 2)
            if isinstance(head, DFlashHead):
                return torch.cat(list(_of_blocks(head, ids, states, steps, self.estimates_per_row)), 1)
            return torch.cat(list(_of_eagle3(head, ids, states, steps)), 1)


def parameters(module: torch.nn.Module | None) -> int:
    return 0 if module is None else sum(weight.numel() for weight in module.parameters())


def _of_eagle3(head: Eagle3Head, ids: Tensor, states: Tensor, steps: int) -> Iterator[Tensor]:
    for step, h in enumerate(unroll(head, _embedded(head, ids), states, steps)):
        yield head.read_out(h[:, : ids.shape[1] - 2 - step])


def _of_blocks(head: DFlashHead, ids: Tensor, states: Tensor, steps: int, anchors: int) -> Iterator[Tensor]:
    rows = torch.arange(anchors).expand(len(ids), -1)
    for place in unroll_rows(head, ids, partial(_embedded, head), states, steps, ids, rows):
        yield place.read


def _embedded(head: StandAlone, tokens: Tensor) -> Tensor:
    return torch.empty(*tokens.shape, head.config.embedding_size)
