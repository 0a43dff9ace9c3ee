"""`exact_view`: a view of a model that gives each draft node the bits of plain decoding's own pass."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeVar

from torch import nn

from specdec.models.exact.attention import with_exact_attention
from specdec.models.exact.draft_pass import DraftPass
from specdec.models.exact.linear import ExactLinear
from specdec.models.exact.node_by_node import node_by_node
from specdec.models.linear import is_plain
from specdec.models.views import view

M = TypeVar("M", bound=nn.Module)

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
    # Vectors and the numbers left over at a tensor's end round activations differently: they run alone as well.
    # Children of a replaced module are not visited: each view replaces what lies within the next one's modules.
    changed = view(model, lambda module: ExactLinear.of(module, draft) if is_plain(module) else module)
    changed = view(changed, lambda module: with_exact_attention(module, draft))
    chosen = {
        id(module)
        for name, module in changed.named_modules()
        if name in alone or type(module).__module__ in ACTIVATIONS
    }
    return view(changed, lambda module: node_by_node(module) if id(module) in chosen else module)
