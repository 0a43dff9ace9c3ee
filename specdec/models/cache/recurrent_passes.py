"""A pass as recurrent layers see it: over `Known` tokens or `Drafted` nodes. `Taken`: the nodes that are kept later.

What follows from them is computed once for all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from specdec.models.cache.buffers import as_column


@dataclass(frozen=True)
class Known:
    """Pass over n known tokens. The first `pads[b]` of row b are padding, which must not change a state."""

    pads: Sequence[int]

    def real(self, x: Tensor) -> Tensor | None:
        """Mask (B, T) bool of the tokens of x (B, T, ...) that are not padding; None if there is no padding."""
        if not any(self.pads):
            return None
        return torch.arange(x.shape[1], device=x.device) >= as_column(self.pads, x.device)

    def turned(self, x: Tensor, back: bool = False) -> Tensor:
        """Rotate x (B, C, T) so that padding comes last; `back`: so that it comes first again."""
        if not any(self.pads):
            return x
        pads = as_column(self.pads, x.device)
        return columns(x, (torch.arange(x.shape[-1], device=x.device) + (-pads if back else pads)) % x.shape[-1])


@dataclass(frozen=True)
class Drafted:
    """Pass over n draft nodes after M waiting ones.

    Attributes:
        nodes: (B, n, M + n) bool, nodes that each new node sees: its ancestors and itself.
        straight: all nodes form one path in order, in each row.
    """

    nodes: Tensor
    straight: bool = False

    @property
    def before(self) -> int:
        """M."""
        return self.nodes.shape[2] - self.nodes.shape[1]

    @cached_property
    def last(self) -> Tensor | None:
        """The last waiting node that each new node sees, (B, n) int64, -1 for none; None if M is 0."""
        if not self.before:
            return None
        seen = self.nodes[..., : self.before] * torch.arange(1, self.before + 1, device=self.nodes.device)
        return seen.amax(-1) - 1

    @cached_property
    def parents(self) -> list[list[int]]:
        """The last node that each new node sees besides itself, waiting or new: n lists of B, -1 for none."""
        above = self.nodes.tril(self.before - 1)
        number = torch.arange(1, above.shape[2] + 1, device=above.device)
        return ((above * number).amax(-1) - 1).T.tolist()

    @cached_property
    def new(self) -> Tensor:
        """Mask (B, 1, n, n) float32 of the new nodes that each new node sees."""
        n = self.nodes.shape[1]
        return self.nodes[:, None, :, -n:].float()

    @cached_property
    def hidden(self) -> Tensor:
        """Mask (B, 1, n, M + n, 1) bool of the nodes that each new node does not see."""
        return ~self.nodes[:, None, ..., None]


@dataclass(frozen=True)
class Taken:
    """Nodes among M waiting ones that states take, and nodes that keep waiting.

    Attributes:
        nodes: (B, M) bool, the nodes of a path; all False for a row whose state stays.
        path: (B, D) int64, the same nodes in order, padded with arbitrary ones.
        last: (B,) int64, last node of the path, -1 for none.
        waiting: (B, R) int64, nodes after the path that keep waiting, in order, padded with arbitrary ones.
        idle: True if the state of some row may stay.
    """

    nodes: Tensor
    path: Tensor
    last: Tensor
    waiting: Tensor
    idle: bool = True
    _columns: dict[int, Tensor] = field(default_factory=dict)

    def columns(self, width: int) -> Tensor:
        """Return the columns (B, width + R) int64 to keep of a line: a window's `width` inputs, then all nodes' inputs.

        The first `width` columns are the new window, the others the inputs of nodes that keep waiting.
        """
        if width not in self._columns:
            window = torch.arange(width, device=self.path.device).expand(len(self.path), -1)
            kept = slid(torch.cat([window, width + self.path], 1)[:, None], self.nodes.sum(1), width)[:, 0]
            self._columns[width] = torch.cat([kept, width + self.waiting], 1)
        return self._columns[width]

    @cached_property
    def end(self) -> Tensor:
        """Last node taken, (B, 1, 1, 1) int64; arbitrary if there is none."""
        return self.last.clamp(min=0)[:, None, None, None]

    @cached_property
    def some(self) -> Tensor:
        """Mask (B, 1, 1, 1) bool of the rows that take any node."""
        return (self.last >= 0)[:, None, None, None]

    @cached_property
    def left(self) -> Tensor:
        """Mask (B, 1, M, 1) bool of the nodes that are not taken."""
        return ~self.nodes[:, None, :, None]


def slid(line: Tensor, by: Tensor, width: int) -> Tensor:
    """Return `width` columns of each row of `line` (B, C, T), from column `by` (B,) on."""
    return columns(line, by[:, None] + torch.arange(width, device=line.device))


def columns(line: Tensor, index: Tensor) -> Tensor:
    """Gather the columns `index` (B, n) of line (B, C, T): (B, C, n)."""
    return line.gather(2, index[:, None].expand(-1, line.shape[1], -1))
