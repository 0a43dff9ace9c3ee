"""`exact_view`: a view of a model that gives each draft node the bits of plain decoding's own pass."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeVar

from torch import nn
from transformers import PreTrainedModel

from specdec.models.exact.attention import with_exact_attention
from specdec.models.exact.draft_pass import DraftPass
from specdec.models.exact.linear import ExactLinear
from specdec.models.exact.node_by_node import node_by_node
from specdec.models.exact.row_by_row import has_own_products
from specdec.models.exact.row_linear import RowLinear
from specdec.models.exact.single_steps import by_single_steps
from specdec.models.introspection import device_of
from specdec.models.linear import is_plain
from specdec.models.views import view

M = TypeVar("M", bound=PreTrainedModel)

EXACT = (ExactLinear, RowLinear)
ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")


def exact_view(model: M, draft: DraftPass, alone: Collection[str] = ()) -> M:
    """A view whose linear layers and attention compute as for one token per row.

    Args:
        model: the model.
        draft: slots of the current pass.
        alone: names of modules that run each node alone, see `exactness`.

    Returns:
        A view for passes over draft nodes. Prompts are read by the model itself.
    """
    # Children of a replaced module are not visited: each view replaces what lies within the next one's modules.
    changed = view(model, lambda module: _exact_linear(module, draft))
    changed = view(changed, lambda module: with_exact_attention(module, draft))
    changed = view(changed, lambda module: by_single_steps(module, draft))
    chosen = {id(module) for name, module in changed.named_modules() if name in alone}
    vectors = device_of(model).type == "cpu"
    return view(changed, lambda m: node_by_node(m) if id(m) in chosen or _runs_alone(m, vectors) else m)


def _exact_linear(module: nn.Module, draft: DraftPass) -> nn.Module:
    if isinstance(module, RowLinear):
        return type(module).of(module, most=None)
    return ExactLinear.of(module, draft) if is_plain(module) else module


def _runs_alone(module: nn.Module, vectors: bool) -> bool:
    """Return whether a module's result may depend on the number of nodes in ways that a probe of one number misses.

    Activations on CPUs round differently in vectors and in what is left over after them. Modules that multiply by
    weights of their own (GPT-2's layers, experts, routers, quantised layers) may take other kernels.
    """
    if vectors and type(module).__module__ in ACTIVATIONS:
        return True
    return has_own_products(module, EXACT)
