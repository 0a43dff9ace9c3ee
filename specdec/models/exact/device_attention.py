"""`row_attention`: attention of single tokens and draft nodes on devices, using the kernel of `node_attention`.

Prompts, and whatever the kernel does not take, run transformers' sdpa function: draft nodes one at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from specdec.models.draft_attention import UNUSUAL
from specdec.models.exact.attention import ON_DEVICES, exact_attention, with_attention
from specdec.models.exact.draft_pass import DraftPass, in_order
from specdec.models.kernels.launch import fits
from specdec.models.kernels.node_attention import MOST_DIMS, node_attention


def with_row_attention(module: nn.Module) -> nn.Module:
    """A copy of an attention module that uses `row_attention`; `module` itself if it is none that runs sdpa."""
    return with_attention(module, ON_DEVICES)


def row_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface. A node gets the bits of a pass over its token alone."""
    draft: DraftPass | None = getattr(module, "_draft_pass", None)
    given = query, key, value, attention_mask, dropout, scaling
    single = query.shape[2] == 1 and (attention_mask is None or attention_mask.dtype == torch.bool)
    if (draft is None and not single) or dropout or not _takes(module, query, key, value, kwargs):
        return (sdpa_attention_forward if draft is None else exact_attention)(module, *given, **kwargs)
    if draft is None:
        order, counts = _columns(attention_mask, key)
    else:
        order, counts = draft.order(draft.span(getattr(module, "layer_idx", 0)))
    scaling = query.shape[3] ** -0.5 if scaling is None else scaling
    return node_attention(query, key, value, order, counts, scaling), None


def _takes(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]) -> bool:
    """Return whether the kernel takes these states, whatever the number of nodes, rows and keys."""
    return (
        fits(query, key, value)
        and max(query.shape[3], value.shape[3]) <= MOST_DIMS
        and query.shape[1] == key.shape[1] * getattr(module, "num_key_value_groups", 1)
        and all(states.stride(-1) == 1 for states in (query, key, value))
        and not any(kwargs.get(name) is not None and kwargs[name] is not False for name in UNUSUAL)
    )


def _columns(mask: Tensor | None, key: Tensor) -> tuple[Tensor, Tensor]:
    """Columns that the only token of each row sees, as `in_order` gives them; mask: (B or 1, 1, 1, T) bool or None."""
    B, T, device = len(key), key.shape[2], key.device
    positions = torch.arange(T, device=device)[None]
    if mask is None:
        return positions.int().expand(B, 1, T).contiguous(), torch.full((B, 1), T, dtype=torch.int32, device=device)
    return in_order(mask[:, 0, :, :T].expand(B, 1, T), positions)


AttentionInterface.register(ON_DEVICES, row_attention)
