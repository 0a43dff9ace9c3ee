"""Cost model of a head in training: its size, and the work and memory of a pass, without any weights.

Modules are created on torch's meta device, and passes run on torch's fake tensors.
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
    """Head with shapes but no weights.

    Args:
        config: config of the head.
        taps: number of the target's states that it reads per token.
        length: tokens per row (T).
        drafted: drafted tokens.
        anchors: anchors per row of texts, for a block drafter.
        device: device to plan for.
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
        """Count the parameters that Muon updates."""
        with META:
            return sum(weight.numel() for weight in matrices(self._head()))

    @property
    def trained_per_row(self) -> int:
        """Maximum number of tokens in a row after which drafts are trained: all, or the anchors."""
        every = self.length - 2
        return min(self.anchors, every) if isinstance(self.config, DFlashConfig) else every

    @property
    def width(self) -> int:
        """Width of the LM head's input (W), including a Markov head's embeddings."""
        return self.config.hidden_size + (self.config.markov_rank if isinstance(self.config, DFlashConfig) else 0)

    def kept_for_gradients(self, rows: int) -> int:
        """Count the bytes that a pass over `rows` rows keeps for the backward pass, if all tokens are trained on."""
        kept: dict[int, torch.UntypedStorage] = {}  # keeps storages alive, so that their addresses are not reused

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if not isinstance(tensor, torch.nn.Parameter):
                kept[storage._cdata] = storage
            return tensor

        with FakeTensorMode(), saved_tensors_hooks(keep, lambda tensor: tensor):
            drafts = self._unrolled(rows)
        gradient = 4 * drafts.numel()  # computed together with the loss
        return sum(storage.nbytes() for storage in kept.values()) + gradient

    def forward_work(self) -> int:
        """Count the floating-point operations over one row, all steps included, logits excluded."""
        with FakeTensorMode(), FlopCounterMode(display=False) as counter, torch.no_grad():
            self._unrolled(1)
        return counter.get_total_flops()

    def _head(self) -> StandAlone:
        return DFlashHead(self.config) if isinstance(self.config, DFlashConfig) else Eagle3Head(self.config)

    def _unrolled(self, rows: int) -> Tensor:
        """Return the LM head's input for all drafts, (rows, n, W)."""
        T, wide = self.length, self.taps * self.config.target_hidden_size
        with self.device:
            head = self._head()
            head.bring_frequencies()
            ids, states = torch.zeros(rows, T, dtype=torch.long), torch.empty(rows, T, wide)
            steps = min(self.drafted, T - 2)
            if isinstance(head, DFlashHead):
                return torch.cat(list(_of_blocks(head, ids, states, steps, self.trained_per_row)), 1)
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
