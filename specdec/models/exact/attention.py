"""`exact_attention`: attention of draft nodes one at a time, with the call that plain decoding makes for one token."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from specdec.models.draft_attention import runs_sdpa
from specdec.models.exact.draft_pass import DraftPass
from specdec.models.views import shallow_copy_as

NAME = "specdec_exact"  # among transformers' attention functions
EAGER = "specdec_exact_eager"  # likewise, for modules with an eager function of their own
MASKED = "specdec_exact_masked"  # likewise: `masked_attention`
EAGER_NAME = "eager_attention_forward"  # in files of models
ON_DEVICES = "specdec_exact_rows"  # likewise: `device_attention.row_attention`


def with_exact_attention(module: nn.Module, draft: DraftPass) -> nn.Module:
    """A copy of an attention module for passes over draft nodes; `module` itself if it runs neither sdpa nor eager.

    It uses `exact_attention`, unless it is a module of `row_kernels`, whose functions read the slots of the pass, too.
    """
    named = with_attention(with_attention(module, NAME), EAGER, instead_of="eager")
    if not any(runs(named, name) for name in (NAME, EAGER, MASKED, ON_DEVICES)):
        return module
    made: Any = shallow_copy_as(named, type(named))
    made._draft_pass = draft
    return made


def with_attention(module: nn.Module, name: str, instead_of: str = "sdpa") -> nn.Module:
    """A copy of an attention module that runs another of transformers' attention functions.

    `module` itself if it does not run the function that is replaced, sdpa or its own eager one.
    """
    found = runs_sdpa(type(module)) if instead_of == "sdpa" else own_eager(type(module)) is not None  # type: ignore[arg-type]  # hashable
    if not runs(module, instead_of) or not found:
        return module
    made: Any = shallow_copy_as(module, type(module))
    made.config = copy.copy(module.config)
    made.config._attn_implementation = name
    return made


def runs(module: nn.Module, name: str) -> bool:
    """Return whether a module's config names this attention function."""
    return getattr(getattr(module, "config", None), "_attn_implementation", None) == name


@cache
def own_eager(kind: type[nn.Module]) -> Callable[..., Any] | None:
    """The eager attention function of a module's own file, which it runs where its config names no other; or None."""
    forward = unwrap(kind.forward)
    code = getattr(forward, "__code__", None)
    if code is None or not {"ALL_ATTENTION_FUNCTIONS", "_attn_implementation"} <= {*code.co_names}:
        return None
    return forward.__globals__.get(EAGER_NAME) if EAGER_NAME in code.co_names else None


def exact_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface. Each node's keys lie as in plain decoding: those it sees, in their order."""
    attend = plain_eager_attention if runs(module, EAGER) else plain_attention
    draft: DraftPass = module._draft_pass  # type: ignore[assignment]
    if draft.are_of_encoder(key):
        parts = []
        for i in range(query.shape[2]):
            mask, named = _of_node(attention_mask, i), {name: _of_node(each, i) for name, each in kwargs.items()}
            attended = attend(module, query[:, :, i : i + 1], key, value, mask, dropout, scaling, **named)
            parts.append(attended[0])
        return torch.cat(parts, 1), None
    span, bias = draft.span(getattr(module, "layer_idx", 0)), kwargs.pop("position_bias", None)
    rows = []
    for row, columns in enumerate(draft.columns(span)):
        keys, values, queries = key[row : row + 1], value[row : row + 1], query[row : row + 1]
        nodes = []
        for i, seen in enumerate(columns):
            if bias is not None:
                kwargs["position_bias"] = bias[row % len(bias), :, i : i + 1, seen.slots][None]
            states = queries[:, :, i : i + 1], keys[:, :, seen.slots], values[:, :, seen.slots]
            nodes.append(attend(module, *states, seen.mask, dropout, scaling, **kwargs)[0])
        rows.append(torch.cat(nodes, 1))
    return torch.cat(rows), None


def _of_node(value: Any, node: int) -> Any:
    """A node's part of a tensor (B, heads, n, S)."""
    return (
        value[:, :, node : node + 1] if isinstance(value, Tensor) and value.dim() == 4 and value.shape[2] > 1 else value
    )


def plain_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention of plain decoding. With `masked_attention` a single token gets a mask, which may hide nothing.

    Without one, torch attends on CPUs with several query heads per key head in its slowest kernel: 1,470 us a layer
    instead of 129 for a token with 14 heads over 2 and 1,000 keys.
    """
    if mask is None and query.shape[2] == 1 and runs(module, MASKED) and kwargs.get("position_bias") is None:
        mask = torch.ones(1, 1, 1, key.shape[2], dtype=torch.bool, device=key.device)
    return sdpa_attention_forward(module, query, key, value, mask, *args, **kwargs)


def plain_eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """Attention of plain decoding by the function of the module's own file, which takes a mask of summands."""
    eager = own_eager(type(module))  # type: ignore[arg-type]  # a class is hashable
    states = (query.contiguous(), key.contiguous(), value.contiguous())
    assert eager is not None
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, torch.finfo(query.dtype).min)
    return eager(module, *states, mask, dropout=dropout, scaling=scaling, **kwargs)


def masked_attention(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """transformers' attention interface: `plain_attention`, and `exact_attention` in passes over draft nodes."""
    return (exact_attention if hasattr(module, "_draft_pass") else plain_attention)(module, *args, **kwargs)


AttentionInterface.register(NAME, exact_attention)
AttentionInterface.register(EAGER, exact_attention)
AttentionInterface.register(MASKED, masked_attention)
