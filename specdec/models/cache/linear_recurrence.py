"""Linear recurrences over the nodes of draft trees: a layer's output at each node, and its state after any of them.

A recurrence lets a state S (K, V) decay, and adds the outer product of a key and a value:

    S_i = exp(g_i) S_parent(i) + k_i u_i^T      g_i: one number (gated delta net, Mamba2), or one for each of K (KDA)

Along a path S_i = exp(c_i) S + sum_j exp(c_i - c_j) k_j u_j^T, summed over node i and its ancestors j. S is the state
before the draft, and c_i is the sum of g from there down to i. Neither an order of nodes nor a state per node is
needed: a matrix of ancestors replaces the triangle of chunked kernels (STree, 2505.14969, for Mamba2). In a delta rule
u_i is beta_i (v_i - k_i^T exp(g_i) S_parent(i)), a triangular system over the same matrix.

Nodes *wait* from the pass that reads them until they are verified. Then the state *takes* the accepted ones: it
advances over them without another pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.models.cache.recurrent_passes import Drafted, Taken


class Recurrence:
    """State (B, H, K, V) float32 of a layer, and its waiting nodes.

    Args:
        state: in the layout of the model's own functions.
        turned: this layout has V before K.
    """

    def __init__(self, state: Tensor, turned: bool):
        self.state, self.turned = state, turned
        self.drop()

    def drop(self) -> None:
        """Drop all waiting nodes."""
        self._keys: Tensor | None = None  # (B, H, M, K)
        self._values: Tensor | None = None  # (B, H, M, V), u in the module's docstring
        self._decay: Tensor | None = None  # (B, H, M, G), c in the module's docstring; G is 1 or K

    def read(self, step: Drafted, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor | None):
        """Return the outputs (B, H, n, V) of n new nodes, each after its own update; the nodes then wait.

        Args:
            step: the pass over these nodes.
            query: (B, H, n, K) float32.
            key: (B, H, n, K) float32.
            value: (B, H, n, V), u in the module's docstring; v there if `beta` is given.
            log_decay: (B, H, n, G), g in the module's docstring.
            beta: (B, H, n, 1), of a delta rule.
        """
        if step.nodes.shape[1:] == (1, 1):
            return self._read_one(query, key, value, log_decay, beta)
        state, M = self._upright, step.before
        decay = step.new @ log_decay
        if step.last is not None:
            decay = decay + _at(self._decay, step.last)
        keys, decays = _joined(self._keys, key), _joined(self._decay, decay)
        between = (decay[:, :, :, None] - decays[:, :, None]).masked_fill_(step.hidden, -torch.inf)
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
        """Fast path of `read` for one node that sees only the state: a row's next token, without a draft."""
        state, since = self._upright, decay.exp()
        if beta is not None:
            value = beta * (value - (key * since) @ state)
        self._keys, self._values, self._decay = key, value, decay
        return (query * since) @ state + (query * key).sum(-1, keepdim=True) * value

    def take(self, taken: Taken) -> None:
        """Advance each row's state to its last node taken."""
        assert self._keys is not None
        assert self._values is not None
        assert self._decay is not None
        _, H, M, G = self._decay.shape
        end = self._decay if M == 1 else self._decay.gather(2, taken.end.expand(-1, H, -1, G))  # (B, H, 1, G)
        if taken.idle:
            end = end * taken.some
        if M == 1:  # no decay after the only node
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
    """State of a layer whose entries decay at different rates (Mamba1), stored after each node: no sum is smaller."""

    def __init__(self, state: Tensor):
        self.state = state  # (B, I, S)
        self.drop()

    def drop(self) -> None:
        self._after: Tensor | None = None  # (B, M, I, S)

    def read(self, step: Drafted, query: Tensor, decay: Tensor, added: Tensor) -> Tensor:
        """Return (B, n, I): products of `query` (B, n, S) and the state after each node.

        A node's state is decay * its parent's state + added; decay and added are (B, n, I, S).
        """
        (B, n), M = decay.shape[:2], step.before
        states = decay.new_empty(B, 1 + M + n, *decay.shape[2:])  # first the one before all nodes
        states[:, 0] = self.state
        if self._after is not None:
            states[:, 1 : 1 + M] = self._after
        rows, parents = torch.arange(B, device=decay.device), _parents(step.nodes, M)
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


def _parents(nodes: Tensor, M: int) -> Tensor:
    """Return 1 + the last node that each new node sees before itself, 0 for none: (B, n); nodes: (B, n, M + n) bool."""
    n = nodes.shape[1]
    column = torch.arange(1, M + n + 1, device=nodes.device)
    before = column <= M + torch.arange(n, device=nodes.device)[:, None]
    return (nodes & before).mul(column).amax(-1)


def _products(x: Tensor, keys: Tensor, between: Tensor) -> Tensor:
    """Multiply x (B, H, n, K) by keys (B, H, M, K), decayed by `between` (B, H, n, M, G): (B, H, n, M)."""
    if between.shape[-1] == 1:
        return (x @ keys.mT) * between[..., 0]
    return ((x[:, :, :, None] * between) * keys[:, :, None]).sum(-1)


def _joined(before: Tensor | None, new: Tensor) -> Tensor:
    return new if before is None else torch.cat([before, new], 2)


def _at(decay: Tensor | None, nodes: Tensor) -> Tensor:
    """Gather decay (B, H, M, G) at nodes (B, n): (B, H, n, G), 0 where a node is -1."""
    assert decay is not None
    return _picked(decay, nodes.clamp(min=0)) * (nodes >= 0)[:, None, :, None]


def _picked(states: Tensor, nodes: Tensor) -> Tensor:
    """Gather states (B, H, M, D) at nodes (B, n): (B, H, n, D)."""
    return states.gather(2, nodes[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3]))
