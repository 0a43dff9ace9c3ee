"""`with_fused_layers`: a view of a model whose layers run the operations between matrix products as fused kernels.

A decoding pass multiplies few rows, and a kernel of a few microseconds for each elementwise operation takes as long as
the products. Triton kernels (`models/kernels`) do the same operations, with the same roundings, in few launches.
"""

from __future__ import annotations

import logging
from typing import TypeVar

from torch import nn

from specdec.models.introspection import is_sharded
from specdec.models.kernels.launch import DTYPES, available
from specdec.models.views import view

log = logging.getLogger(__name__)

M = TypeVar("M", bound=nn.Module)


def with_fused_layers(model: M) -> M:
    """A view of `model` whose norms, MLPs, attention and decoder layers use fused kernels; `model` if none can.

    Works on any tree of modules. Norms and MLPs are swapped one by one. Attention writes rotated keys directly into a
    `SlottedCache`, and runs as before with any other cache. A swap needs a module of a known structure whose output it
    reproduces: both run once on random input, for each class and shape, but not while a CUDA graph is captured. Modules
    with hooks keep their own code, except for decoder layers, which are called as before. A fused module runs its
    original code where gradients are enabled, under autocast, and for tensors of mixed dtypes.

    Example:
        ```python
        fused = with_fused_layers(model)
        with torch.no_grad():
            logits = fused(input_ids).logits
        ```
    """
    first = next((weight for weight in model.parameters() if weight.dtype in DTYPES), None)
    if first is None or not available(first.device) or is_sharded(model):
        return model
    try:
        from specdec.models.fuser import Fuser
    except ImportError as error:  # Triton's own
        log.info("no fused layers: %s", error)
        return model
    return view(model, Fuser(first.dtype, first.device))
