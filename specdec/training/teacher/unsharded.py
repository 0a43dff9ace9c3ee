"""`plain`: a layer of a target's with weights that can be copied: all of them here, and not quantised."""

from __future__ import annotations

from typing import TypeVar

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn

from specdec.models.introspection import is_sharded
from specdec.models.views import whole

M = TypeVar("M", bound=nn.Module)


@torch.no_grad()
def plain(module: M) -> M | nn.Linear:
    """The module itself, if it is so; else a copy: of one in several processes, all of which must ask, of one that
    accelerate keeps elsewhere, or of a linear layer that is quantised, in the format in which it multiplies.
    """
    if is_sharded(module):
        return whole(module)
    if any(type(weight) is nn.Parameter and weight.is_meta for weight in module.parameters(recurse=False)):
        with align_module_device(module):
            return whole(module)
    if not isinstance(module, nn.Linear) or type(module.weight) in (Tensor, nn.Parameter):
        return module
    # Every kind of quantised layer stores its numbers in a way of its own, but all multiply.
    unit = torch.eye(module.in_features, device=module.weight.device)
    unit = unit.to(module.weight.dtype if module.weight.is_floating_point() else torch.get_default_dtype())
    rows = module(unit)  # (in, out)
    copy = nn.Linear(module.in_features, module.out_features, module.bias is not None, device="meta")
    bias = None if module.bias is None else nn.Parameter(module.bias.detach(), requires_grad=False)
    copy.bias = bias
    copy.weight = nn.Parameter((rows if bias is None else rows - bias).T.contiguous(), requires_grad=False)
    return copy
