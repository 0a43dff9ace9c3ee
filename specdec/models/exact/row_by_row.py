"""`with_rows_apart`: a view of a model whose experts and other modules with products of their own run each row alone.

How an expert multiplies depends on the number of rows that are routed to it.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any, TypeVar

from torch import Tensor, nn

from specdec.models.exact.node_by_node import in_parts
from specdec.models.exact.row_linear import ROWS
from specdec.models.views import shallow_copy_as, view

M = TypeVar("M", bound=nn.Module)


def with_rows_apart(model: M) -> M:
    """A view of `model` in which such modules run each row alone in passes over single tokens, but not in prompts."""
    return view(model, lambda module: row_by_row(module) if has_own_products(module) else module)


def has_own_products(module: nn.Module, linears: tuple[type[nn.Module], ...] = (nn.Linear,)) -> bool:
    """Return whether a module multiplies by weights of its own: experts, routers, GPT-2's and quantised layers.

    linears: kinds of layers that are taken care of, and so are modules that hold some.
    """
    weights = [weight for weight in module._parameters.values() if weight is not None and weight.dim() > 1]
    if not weights or isinstance(module, nn.Embedding):
        return False
    return not any(isinstance(part, linears) for part in module.modules())


def row_by_row(module: nn.Module) -> nn.Module:
    """A copy of `module` that shares its weights and runs each row of (B, 1, ...) or (B, ...) alone."""
    kind: Any = _apart(type(module))  # type: ignore[arg-type]  # a class is hashable, whatever its instances are
    return shallow_copy_as(module, kind)


@cache
def _apart(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        count = hidden.shape[0]
        if not 1 < count <= ROWS or (hidden.dim() > 2 and hidden.shape[1] > 1):
            return kind.forward(self, hidden, *args, **kwargs)
        return in_parts(partial(kind.forward, self), (hidden, *args), kwargs, dim=0)

    return type(kind.__name__, (kind,), {"forward": forward})
