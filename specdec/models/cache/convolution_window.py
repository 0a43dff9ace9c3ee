"""`Window`: the last inputs of a layer's causal convolution, and its outputs at the nodes of draft trees."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specdec.models.cache.buffers import as_column
from specdec.models.cache.recurrent_passes import Drafted, Known, Taken, columns, slid


class Window:
    """Last inputs (B, C, W) of a layer's causal convolution, and the inputs of its waiting nodes."""

    def __init__(self, state: Tensor):
        self.state = state
        self.drop()

    def drop(self) -> None:
        self._line: Tensor | None = None  # (B, C, W + M)

    @property
    def latest(self) -> Tensor:
        """Last W inputs (B, C, W), including those of waiting nodes, which must form one path in order."""
        line = self.state if self._line is None else self._line
        return line[..., -self.state.shape[-1] :]

    def extend(self, inputs: Tensor) -> Tensor:
        """Append the inputs (B, C, n) of new nodes, which then wait; return all inputs (B, C, W + M + n)."""
        self._line = torch.cat([self.state if self._line is None else self._line, inputs], -1)
        return self._line

    def read(self, step: Known | Drafted, inputs: Tensor) -> Tensor:
        """Return all inputs (B, C, T), those of the pass (B, C, n) last.

        The window moves on over known tokens. Draft nodes wait.
        """
        if isinstance(step, Drafted):
            return self.extend(inputs)
        line, n, width = torch.cat([self.state, step.turned(inputs)], -1), inputs.shape[-1], self.state.shape[-1]
        if any(step.pads):
            self.state = slid(line, n - as_column(step.pads, line.device)[:, 0], width)
        else:
            self.state = line[..., n:].contiguous()
        return line

    def convolved(self, step: Known | Drafted, line: Tensor, width: int, native: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply a layer's convolution to the inputs that `read` returned; see `States.convolved`."""
        before = self.state.shape[-1]
        if isinstance(step, Known):
            return step.turned(native(line)[..., before - line.shape[-1] :], back=True)
        if step.straight:
            return native(line)
        # The inputs of all nodes are concatenated, `width` for each, so every `width`-th output is a node's.
        index = paths(step.nodes, before, width).flatten(1)  # (B, n * K)
        return native(columns(line, index))[..., width - 1 :: width]

    def take(self, taken: Taken) -> None:
        assert self._line is not None
        width = self.state.shape[-1]
        line = columns(self._line, taken.columns(width))
        self.state = line[..., :width]
        self._line = line if taken.waiting.shape[1] else None


def paths(nodes: Tensor, window: int, width: int) -> Tensor:
    """Index the last `width` inputs of each node in a line of a window and all nodes: (B, n, width) int64.

    Args:
        nodes: (B, n, M) bool, each node's ancestors and itself.
        window: number of inputs before the nodes, at least `width`.
        width: inputs per output of the convolution.
    """
    B, n, M = nodes.shape
    count = nodes.sum(-1, keepdim=True)
    place = width - count + nodes.cumsum(-1) - 1  # index among the last `width` inputs, negative if too far back
    place = torch.where(nodes & (place >= 0), place, width)
    index = window - width + count + torch.arange(width + 1, device=nodes.device)  # inputs from the window
    node = (window + torch.arange(M, device=nodes.device)).expand(B, n, M)
    return index.clamp(max=window - 1).scatter(2, place, node)[..., :width]
