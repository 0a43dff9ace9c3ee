"""Conversion of a target's layers to layers whose weights can be copied: unsharded, not offloaded, not quantised."""

from __future__ import annotations

from typing import TypeVar

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn

from specdec.models.introspection import is_sharded
from specdec.models.views import whole

M = TypeVar("M", bound=nn.Module)


@torch.no_grad()
def materialized(module: M) -> M | nn.Linear:
    """Return a module whose weights can be copied: the module itself if possible, otherwise a copy.

    Sharded modules, modules offloaded by accelerate and quantised linear layers are copied. The copy of a quantised
    layer has the format in which it multiplies. For a sharded module all processes must call this.
    """
    if is_sharded(module):
        return whole(module)
    if any(type(weight) is nn.Parameter and weight.is_meta for weight in module.parameters(recurse=False)):
        with align_module_device(module):
            return whole(module)
    if not isinstance(module, nn.Linear) or type(module.weight) in (Tensor, nn.Parameter):
        return module
    # Each kind of quantised layer stores its weights differently, but all can be multiplied with.
    unit = torch.eye(module.in_features, device=module.weight.device)
    unit = unit.to(module.weight.dtype if module.weight.is_floating_point() else torch.get_default_dtype())
    rows = module(unit)  # (in, out)
    copy = nn.Linear(module.in_features, module.out_features, module.bias is not None, device="meta")
    bias = None if module.bias is None else nn.Parameter(module.bias.detach(), requires_grad=False)
    copy.bias = bias
    copy.weight = nn.Parameter((rows if bias is None else rows - bias).T.contiguous(), requires_grad=False)
    return copy
