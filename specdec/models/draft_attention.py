"""`attend`: attention of draft nodes over KV buffers; `with_draft_attention`: a view of a model that uses it.

transformers copies keys and values for each query head that shares them, and torch converts a boolean mask in every
layer. Here the query heads of a key head are packed into one, and what follows from a mask is computed once per pass.
On CUDA a Triton kernel reads long buffers (`models/kernels/tree_attention.py`). It is used after a check that its
results are right.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from specdec.models.kernels.launch import DTYPES, compiles_for
from specdec.models.views import shallow_copy_as, view

log = logging.getLogger(__name__)

M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")
NAME = "specdec_draft"  # among transformers' attention functions
TRITON_FROM = 512  # slots; fewer were not measured (benchmarks/regression/attention.py)
MOST_NODES = 256  # per row; packing repeats the mask of more nodes too often
UNUSUAL = ("softcap", "s_aux", "position_bias", "head_mask", "output_attentions")  # arguments left to transformers
WRONG = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}  # tolerance of the kernel's check


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float | None = None) -> Tensor:
    """Attention with G query heads per key head. What follows from `mask` is kept with it: do not change it later.

    Args:
        query: (B, KV * G, n, D).
        keys: (B, KV, S, D).
        values: (B, KV, S, Dv).
        mask: (B, n, S) or (B, 1, n, S) bool, True for slots that a node sees. The batch may be 1.
        scaling: factor of the scores; None: 1 / sqrt(D).

    Returns:
        (B, n, KV * G, Dv), contiguous.

    Example:
        ```python
        query, keys, values = torch.randn(1, 8, 3, 64), torch.randn(1, 2, 512, 64), torch.randn(1, 2, 512, 64)
        attend(query, keys, values, torch.ones(1, 3, 512, dtype=torch.bool)).shape  # (1, 3, 8, 64)
        ```
    """
    n, groups = query.shape[2], query.shape[1] // keys.shape[1]
    if n > MOST_NODES:
        keys, values = (states.repeat_interleave(groups, 1) for states in (keys, values))
        seen = mask if mask.dim() == 4 else mask[:, None]
        out = nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=seen, scale=scaling)
        return out.transpose(1, 2).contiguous()
    if _runs_kernel(query, keys, values, mask):
        from specdec.models.kernels.tree_attention import tree_attention, visible_range

        scaling = query.shape[3] ** -0.5 if scaling is None else scaling
        return tree_attention(query, keys, values, _of_rows(mask), *_once(mask, "range", visible_range), scaling)
    added = _once(mask, (query.dtype, groups), lambda mask: _added(mask, query.dtype, groups))
    packed = query.reshape(len(query), -1, groups * n, query.shape[3])  # node by node, group by group
    out = nn.functional.scaled_dot_product_attention(packed, keys, values, attn_mask=added, scale=scaling)
    return out.reshape(*query.shape[:3], values.shape[3]).transpose(1, 2).contiguous()


def with_draft_attention(model: M) -> M:
    """A view of `model` whose attention modules use `attend` for passes with a boolean mask of few nodes.

    Only modules whose attention function is transformers' "sdpa" are replaced. Masks are built as before: the config of
    the model does not change. Any other pass runs transformers' function.

    Example:
        ```python
        fast = with_draft_attention(AutoModelForCausalLM.from_pretrained(path))
        ```
    """
    configs: dict[int, Any] = {}

    def swap(module: nn.Module) -> nn.Module:
        config = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) != "sdpa" or not runs_sdpa(type(module)):
            return module
        if id(config) not in configs:
            configs[id(config)] = copy.deepcopy(config)
            configs[id(config)]._attn_implementation = NAME
        ours = shallow_copy_as(module, type(module))
        ours.config = configs[id(config)]
        return ours

    return view(model, swap)


def runs_sdpa(kind: type[nn.Module]) -> bool:
    """Return whether a module's forward pass finds transformers' sdpa function by the name in its config."""
    forward = inspect.unwrap(kind.forward)
    code: Any = getattr(forward, "__code__", None)
    if code is None or not {"ALL_ATTENTION_FUNCTIONS", "_attn_implementation"} <= {*code.co_names}:
        return False
    functions = forward.__globals__.get("ALL_ATTENTION_FUNCTIONS", {})
    names = [each for const in code.co_consts for each in (const if isinstance(const, (tuple, frozenset)) else [const])]
    return functions.get("sdpa") is sdpa_attention_forward and "sdpa" not in names


def draft_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' interface of `attend`. Whatever `attend` does not do, transformers' sdpa function does."""
    if (
        isinstance(attention_mask, Tensor)
        and attention_mask.dtype == torch.bool
        and attention_mask.dim() == 4
        and attention_mask.shape[0] in (1, len(query))
        and attention_mask.shape[1:] == (1, query.shape[2], key.shape[2])
        and len(query) == len(key)
        and query.shape[1] == key.shape[1] * getattr(module, "num_key_value_groups", 1)
        and query.shape[2] <= MOST_NODES
        and not dropout
        and not any(kwargs.get(name) is not None and kwargs[name] is not False for name in UNUSUAL)
    ):
        return attend(query, key, value, attention_mask, scaling), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)


AttentionInterface.register(NAME, draft_attention)


# Values derived from a mask


def _once(mask: Tensor, form: Hashable, make: Callable[[Tensor], T]) -> T:
    """`make(mask)`, computed once. It is kept in an attribute of the tensor: a capture makes a mask of its own."""
    forms = vars(mask).setdefault("_specdec_forms", {})
    if form not in forms:
        forms[form] = make(_of_rows(mask))
    return forms[form]


def _of_rows(mask: Tensor) -> Tensor:
    """The mask as (B, n, S)."""
    return mask if mask.dim() == 3 else mask[:, 0]


def _added(mask: Tensor, dtype: torch.dtype, groups: int) -> Tensor:
    """The mask (B, n, S) as summands of the scores of packed queries, (B, 1, G * n, S).

    They have the dtype of the queries: cuDNN misreads float32 summands beside bfloat16 queries.
    """
    added = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)
    return (added if mask.shape[1] == 1 else added.repeat(1, groups, 1))[:, None]


# The kernel

_right: dict[tuple[Any, ...], bool] = {}  # whether the kernel's results are right, by dtype, sizes and device


def _runs_kernel(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> bool:
    """Return whether the Triton kernel is used. It is checked at the first use, which must not be a capture."""
    if keys.shape[2] < TRITON_FROM or not compiles_for(query.device) or torch.is_autocast_enabled(query.device.type):
        return False
    if torch.is_grad_enabled() and any(states.requires_grad for states in (query, keys, values)):
        return False
    if any(states.dtype != query.dtype for states in (keys, values)):
        return False
    if any(given.stride(-1) != 1 for given in (query, keys, values, mask)):
        return False
    kind = query.dtype, query.shape[3], values.shape[3], query.shape[1] // keys.shape[1], query.device
    if kind not in _right:
        if torch.cuda.is_current_stream_capturing():
            return False
        _right[kind] = _is_right(*kind)
    return _right[kind]


def skips_empty_slots(device: torch.device) -> bool:
    """Return whether attention to long buffers takes no time for empty slots, as far as was found out on a device."""
    return any(right and kind[-1] == device for kind, right in _right.items())


def _is_right(dtype: torch.dtype, dims: int, value_dims: int, groups: int, device: torch.device) -> bool:
    """Compare the kernel with float64 on ragged rows of random states. Slots after the rows hold NaN."""
    generator = torch.Generator("cpu").manual_seed(0)
    shapes = (2, 2 * groups, 3, dims), (2, 2, 700, dims), (2, 2, 700, value_dims)
    query, keys, values = (torch.randn(shape, generator=generator, device="cpu").to(device, dtype) for shape in shapes)
    mask = torch.rand(2, 3, 700, generator=generator, device="cpu") < 0.9
    for row, length in enumerate((650, 130)):
        mask[row, :, length:] = False
        values[row, :, length:] = torch.nan
    try:
        from specdec.models.kernels.tree_attention import MOST_DIMS, tree_attention, visible_range

        if dtype not in DTYPES or max(dims, value_dims) > MOST_DIMS:
            return False
        there = mask.to(device)
        ours = tree_attention(query, keys, values, there, *visible_range(there), dims**-0.5)
        error = float((ours.double() - _reference(query, keys, values, there)).abs().max())
    except Exception as failure:  # no Triton, an old device, or a compiler's error
        log.info("no Triton attention: %s", failure)
        return False
    if not error <= WRONG[dtype]:
        log.info("no Triton attention: its results differ by %.2g for %s", error, (dtype, dims, groups))
        return False
    return True


def _reference(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attention in float64, (B, n, H, Dv)."""
    B, H, n, D = query.shape
    packed = query.double().reshape(B, keys.shape[1], -1, n, D)
    scores = packed @ keys.double()[:, :, None].transpose(-1, -2) * D**-0.5
    weights = scores.masked_fill(~mask[:, None, None], -torch.inf).softmax(-1)
    return (weights @ values.double().nan_to_num(0.0)[:, :, None]).reshape(B, H, n, -1).transpose(1, 2)
