"""`node_by_node`: a module that runs each draft node alone, as plain decoding runs one token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from specdec.models.views import shallow_copy_as


def node_by_node(module: nn.Module) -> nn.Module:
    """A copy of `module` that shares its weights and runs each node of (B, n, ...) or (n, ...) alone.

    Tensors among its arguments and results that have as many nodes in that dimension are split and joined again.
    """
    kind: Any = _alone(type(module))  # type: ignore[arg-type]  # a class is hashable, whatever its instances are
    return shallow_copy_as(module, kind)


@cache
def _alone(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        nodes = 1 if hidden.dim() > 2 else 0  # the dimension: experts take (n, ...)
        return in_parts(partial(kind.forward, self), (hidden, *args), kwargs, nodes)

    return type(kind.__name__, (kind,), {"forward": forward})


def in_parts(run: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], dim: int) -> Any:
    """Run a function for each entry alone that its first argument has in a dimension, and join the results."""
    count = args[0].shape[dim]
    results = []
    for i in range(count):
        named = {name: part_of(each, i, count, dim) for name, each in kwargs.items()}
        results.append(run(*(part_of(each, i, count, dim) for each in args), **named))
    return joined(results, dim)


def part_of(value: Any, node: int, count: int, dim: int = 1) -> Any:
    """A node's part of a tensor that has `count` nodes in this dimension; any other value as it is."""
    split = isinstance(value, Tensor) and value.dim() > dim and value.shape[dim] == count
    return value.narrow(dim, node, 1).contiguous() if split else value


def joined(results: list[Any], nodes: int = 1) -> Any:
    """Results of single nodes as one; nodes: the dimension of tensors that holds them."""
    first = results[0]
    if isinstance(first, Tensor):
        return torch.cat(results, nodes if first.dim() > 2 else 0)
    if isinstance(first, (tuple, list)):
        return type(first)(joined(list(each), nodes) for each in zip(*results, strict=True))
    return first
