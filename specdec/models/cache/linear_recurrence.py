"""Linear recurrences over the nodes of draft trees: what a layer reads at each node, and its state after any of them.

Owns the arithmetic, and the nodes that a layer's state is yet to take in. Knows nothing of models or caches.

All of them let a state S (K, V) decay, and add the outer product of a key and a value:

    S_i = exp(g_i) S_parent(i) + k_i u_i^T      g_i: one number (gated delta net, Mamba2), or one for each of K (KDA)

so that along a path S_i = exp(c_i) S + sum_j exp(c_i - c_j) k_j u_j^T over node i and its ancestors j, where c_i is the
sum of g from the state S before the draft down to i. Neither an order of nodes nor a state per node is needed: a
matrix of ancestors stands where chunked kernels have a triangle (STree, 2505.14969, for Mamba2). In a delta rule u_i
is beta_i (v_i - k_i^T exp(g_i) S_parent(i)): a triangular system over the same matrix.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sees:
    """What n new nodes see of M nodes before them and of one another.

    Attributes:
        nodes: (B, n, M + n) bool, a node's ancestors and itself. last: (B, n) int64, the last of the M that it sees,
            -1 for none; None where M is 0.
    """

    nodes: Tensor
    last: Tensor | None

    @cached_property
    def new(self) -> Tensor:
        """(B, 1, n, n) float32, what the new nodes see of one another."""
        n = self.nodes.shape[1]
        return self.nodes[:, None, :, -n:].float()

    @cached_property
    def hidden(self) -> Tensor:
        """(B, 1, n, M + n, 1) bool, what they do not see."""
        return ~self.nodes[:, None, ..., None]


@dataclass(frozen=True)
class Taken:
    """Which of M nodes a state takes in, and which go on waiting. What all layers ask of it is computed once.

    Attributes:
        nodes: (B, M) bool, a path, none for a row that stays as it is. path: (B, D) int64, the same in order, and
            behind its end any. last: (B,) int64, its last node, -1 for none. waiting: (B, R) int64, nodes that come
            after it and are kept, in order; behind a row's own, any. idle: a row may stay as it is.
    """

    nodes: Tensor
    path: Tensor
    last: Tensor
    waiting: Tensor
    idle: bool = True
    _columns: dict[int, Tensor] = field(default_factory=dict)

    def columns(self, width: int) -> Tensor:
        """(B, width + R) int64, in a line of a window of so many inputs and of all nodes' inputs: where the window's
        lie once the nodes are taken in, and those of nodes that wait."""
        if width not in self._columns:
            window = torch.arange(width, device=self.path.device).expand(len(self.path), -1)
            kept = slid(torch.cat([window, width + self.path], 1)[:, None], self.nodes.sum(1), width)[:, 0]
            self._columns[width] = torch.cat([kept, width + self.waiting], 1)
        return self._columns[width]

    @cached_property
    def end(self) -> Tensor:
        """(B, 1, 1, 1) int64, the last node that is taken in; where it is none, any."""
        return self.last.clamp(min=0)[:, None, None, None]

    @cached_property
    def some(self) -> Tensor:
        """(B, 1, 1, 1) bool, rows that take something in."""
        return (self.last >= 0)[:, None, None, None]

    @cached_property
    def left(self) -> Tensor:
        """(B, 1, M, 1) bool, nodes that are not taken in."""
        return ~self.nodes[:, None, :, None]


class Recurrence:
    """A layer's state (B, H, K, V) float32 and the nodes it is yet to take in.

    Args:
        state: as the model's own functions have it. turned: that is with V before K.
    """

    def __init__(self, state: Tensor, turned: bool):
        self.state, self.turned = state, turned
        self.drop()

    def empty(self, batch_size: int) -> Recurrence:
        """Of as many rows, all zeros."""
        return Recurrence(_zeros(self.state, batch_size), self.turned)

    def drop(self) -> None:
        """Forget all nodes."""
        self._keys: Tensor | None = None  # (B, H, M, K)
        self._values: Tensor | None = None  # (B, H, M, V), u above
        self._decay: Tensor | None = None  # (B, H, M, G), c above; G is 1 or K

    def read(self, sees: Sees, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor | None):
        """What n new nodes read, (B, H, n, V), each after its own update; they wait to be taken in from now on.

        Args:
            query, key: (B, H, n, K) float32. value: (B, H, n, V), u above; with `beta` (B, H, n, 1) v above.
            log_decay: (B, H, n, G), g above.
        """
        if sees.nodes.shape[1:] == (1, 1):
            return self._read_one(query, key, value, log_decay, beta)
        state, M = self._upright, sees.nodes.shape[-1] - key.shape[2]
        decay = sees.new @ log_decay
        if sees.last is not None:
            decay = decay + _at(self._decay, sees.last)
        keys, decays = _joined(self._keys, key), _joined(self._decay, decay)
        between = (decay[:, :, :, None] - decays[:, :, None]).masked_fill_(sees.hidden, -torch.inf)
        between, since = between.exp_(), decay.exp()  # (B, H, n, M + n, G), (B, H, n, G)
        if beta is not None:
            overlap = beta * _products(key, keys, between)
            known = (key * since) @ state
            value = beta * (value - known)
            if self._values is not None:
                value = value - overlap[..., :M] @ self._values
            value = torch.linalg.solve_triangular(overlap[..., M:], value, upper=False, unitriangular=True)
        self._keys, self._values, self._decay = keys, _joined(self._values, value), decays
        return (query * since) @ state + _products(query, keys, between) @ self._values

    def _read_one(self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None) -> Tensor:
        """Of a node that sees nothing but the state: a row's next token, without a draft behind it."""
        state, since = self._upright, decay.exp()
        if beta is not None:
            value = beta * (value - (key * since) @ state)
        self._keys, self._values, self._decay = key, value, decay
        return (query * since) @ state + (query * key).sum(-1, keepdim=True) * value

    def take(self, taken: Taken) -> None:
        """The state after the last node taken, row by row."""
        assert self._keys is not None
        assert self._values is not None
        assert self._decay is not None
        _, H, M, G = self._decay.shape
        end = self._decay if M == 1 else self._decay.gather(2, taken.end.expand(-1, H, -1, G))  # (B, H, 1, G)
        if taken.idle:
            end = end * taken.some
        if M == 1:  # has not decayed since
            keys = self._keys * taken.some if taken.idle else self._keys
        else:
            keys = self._keys * (end - self._decay).masked_fill_(taken.left, -torch.inf).exp_()
        one, other = (self._values, keys) if self.turned else (keys, self._values)
        self.state = (self.state.float() * (end if self.turned else end.mT).exp()).contiguous()
        self.state.view(-1, *self.state.shape[2:]).baddbmm_(one.mT.flatten(0, 1), other.flatten(0, 1))
        if taken.waiting.shape[1]:
            self._keys, self._values = (_picked(nodes, taken.waiting) for nodes in (self._keys, self._values))
            self._decay = _picked(self._decay, taken.waiting) - end
        else:
            self.drop()

    @property
    def _upright(self) -> Tensor:
        return (self.state.mT if self.turned else self.state).float()


class Scan:
    """A layer's state whose numbers decay one by one (Mamba1), and what it is after each node: no sum is smaller."""

    def __init__(self, state: Tensor):
        self.state = state  # (B, I, S)
        self.drop()

    def empty(self, batch_size: int) -> Scan:
        return Scan(_zeros(self.state, batch_size))

    def drop(self) -> None:
        self._after: Tensor | None = None  # (B, M, I, S)

    def read(self, sees: Sees, query: Tensor, decay: Tensor, added: Tensor) -> Tensor:
        """(B, n, I): `query` (B, n, S) at the states after each node, decay * parent's + added, both (B, n, I, S)."""
        B, n = decay.shape[:2]
        M = sees.nodes.shape[-1] - n
        states = decay.new_empty(B, 1 + M + n, *decay.shape[2:])  # the one before all nodes first
        states[:, 0] = self.state
        if self._after is not None:
            states[:, 1 : 1 + M] = self._after
        rows, parents = torch.arange(B, device=decay.device), _parents(sees.nodes, M)
        for i in range(n):
            states[:, 1 + M + i] = decay[:, i] * states[rows, parents[:, i]] + added[:, i]
        self._after = states[:, 1:]
        return (self._after[:, M:] @ query[..., None])[..., 0]

    def take(self, taken: Taken) -> None:
        assert self._after is not None
        rows = torch.arange(len(self.state), device=self.state.device)
        after = self._after[rows, taken.last.clamp(min=0)]
        self.state = torch.where((taken.last >= 0)[:, None, None], after, self.state.to(after))
        self._after = self._after[rows[:, None], taken.waiting] if taken.waiting.shape[1] else None


class Window:
    """A layer's last inputs (B, C, W) for its causal convolution, and those of nodes it is yet to take in."""

    def __init__(self, state: Tensor):
        self.state = state
        self.drop()

    def empty(self, batch_size: int) -> Window:
        return Window(_zeros(self.state, batch_size))

    def drop(self) -> None:
        self._line: Tensor | None = None  # (B, C, W + M)

    @property
    def latest(self) -> Tensor:
        """(B, C, W): the last inputs, those of waiting nodes included, which form one path in order."""
        line = self.state if self._line is None else self._line
        return line[..., -self.state.shape[-1] :]

    def extend(self, inputs: Tensor) -> Tensor:
        """(B, C, W + M + n): the window and all nodes, `inputs` (B, C, n) being the new ones', which wait from now."""
        self._line = torch.cat([self.state if self._line is None else self._line, inputs], -1)
        return self._line

    def take(self, taken: Taken) -> None:
        assert self._line is not None
        width = self.state.shape[-1]
        line = _columns(self._line, taken.columns(width))
        self.state = line[..., :width]
        self._line = line if taken.waiting.shape[1] else None


def slid(line: Tensor, by: Tensor, width: int) -> Tensor:
    """(B, C, width) of each row of `line` (B, C, T), from column `by` (B,) on."""
    return _columns(line, by[:, None] + torch.arange(width, device=line.device))


def paths(nodes: Tensor, window: int, width: int) -> Tensor:
    """(B, n, width) int64: where the last `width` inputs of each node lie in a line of a window and of all nodes.

    Args:
        nodes: (B, n, M) bool, each one's ancestors and itself. window: inputs from before, `width` at least.
    """
    B, n, M = nodes.shape
    count = nodes.sum(-1, keepdim=True)
    place = width - count + nodes.cumsum(-1) - 1  # of each input among the last `width`: negative where too far back
    place = torch.where(nodes & (place >= 0), place, width)
    index = window - width + count + torch.arange(width + 1, device=nodes.device)  # what the window still gives
    node = (window + torch.arange(M, device=nodes.device)).expand(B, n, M)
    return index.clamp(max=window - 1).scatter(2, place, node)[..., :width]


def _parents(nodes: Tensor, M: int) -> Tensor:
    """(B, n): 1 + the last node that each of n new ones sees before itself, 0 for none; (B, n, M + n) bool."""
    n = nodes.shape[1]
    column = torch.arange(1, M + n + 1, device=nodes.device)
    before = column <= M + torch.arange(n, device=nodes.device)[:, None]
    return (nodes & before).mul(column).amax(-1)


def _products(x: Tensor, keys: Tensor, between: Tensor) -> Tensor:
    """(B, H, n, M): the products of x (B, H, n, K) and keys (B, H, M, K) that have decayed by (B, H, n, M, G)."""
    if between.shape[-1] == 1:
        return (x @ keys.mT) * between[..., 0]
    return ((x[:, :, :, None] * between) * keys[:, :, None]).sum(-1)


def _joined(before: Tensor | None, new: Tensor) -> Tensor:
    return new if before is None else torch.cat([before, new], 2)


def _at(decay: Tensor | None, nodes: Tensor) -> Tensor:
    """(B, H, n, G) of decay (B, H, M, G) at nodes (B, n); 0 at -1."""
    assert decay is not None
    return _picked(decay, nodes.clamp(min=0)) * (nodes >= 0)[:, None, :, None]


def _picked(states: Tensor, nodes: Tensor) -> Tensor:
    """(B, H, n, D) of states (B, H, M, D) at nodes (B, n)."""
    return states.gather(2, nodes[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3]))


def _columns(line: Tensor, columns: Tensor) -> Tensor:
    """(B, C, n) of line (B, C, T) at columns (B, n)."""
    return line.gather(2, columns[:, None].expand(-1, line.shape[1], -1))


def _zeros(state: Tensor, batch_size: int) -> Tensor:
    return state.new_zeros(batch_size, *state.shape[1:])
