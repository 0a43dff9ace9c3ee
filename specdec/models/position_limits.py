"""`positions_of`: the number of positions of a model, found by running it at a position far beyond any table.

Learned and sinusoidal embeddings, and buffers of the same length, are tables in which a pass looks positions up. A
lookup beyond a table's end raises an error on CPUs, and on CUDA makes the process unusable: no draft may cause one.
RoPE computes its angles and has no limit.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from specdec.models.encoder import declined, stand_in
from specdec.models.introspection import device_of, is_sharded, takes_positions
from specdec.models.positions import counted_positions

FAR = 2**20  # a position beyond any table
ATEN = torch.ops.aten


@torch.no_grad()
def positions_of(model: PreTrainedModel) -> int | None:
    """Return the number of positions, from 0 on, at which a pass can place a token; None: unlimited.

    Args:
        model: a model that nothing else is using, as the pass may leave state in it.
    """
    if not takes_positions(model):
        # MPT computes its biases in each pass, for the number of positions in its config.
        config = model.config.get_text_config(decoder=True)
        return counted_positions(model) or getattr(config, "max_seq_len", None)
    if is_sharded(model) and any(hasattr(module, "max_seq_len_cached") for module in model.modules()):
        return (
            None  # RoPE. The model is shared with other calls, and its frequencies may depend on the farthest position
        )
    token = torch.ones(1, 1, dtype=torch.long, device=device_of(model))
    inputs = {
        "input_ids": token,
        "position_ids": token * FAR,
        "use_cache": False,
        "return_dict": True,
        **declined(model),
    }
    encoder_outputs = stand_in(model, 1)
    with _Lookups() as lookups, suppress(Exception):  # a model may reject the position: lookups so far count
        model(**(inputs if encoder_outputs is None else encoder_outputs.read_by(model, inputs)))
    return lookups.positions


class _Lookups(TorchDispatchMode):
    """Clamp lookups of a pass at position `FAR` to the last entry of any shorter table.

    Attributes:
        positions: number of positions in the shortest of these tables; None if there was none.
    """

    positions: int | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ATEN.embedding.default:
            table, index, *rest = args
            args = (table, self._within(table.shape[0], index), *rest)
        elif func is ATEN.index.Tensor:
            table, indices = args
            args = (table, [self._within(*each) for each in zip(table.shape, indices, strict=False)])
        elif func is ATEN.gather.default:
            table, dim, index, *rest = args
            args = (table, dim, self._within(table.shape[dim], index), *rest)
        elif func is ATEN.index_select.default:  # used by models whose tables grow with the text
            table, dim, index = args
            args = (table, dim, index.clamp(max=table.shape[dim] - 1))
        return func(*args, **(kwargs or {}))

    def _within(self, size: int, index: Tensor | None) -> Tensor | None:
        if index is None or index.dtype == torch.bool or not index.numel():
            return index
        farthest = int(index.max())
        if farthest < size:
            return index
        if size > 1:  # a table of one entry was made for this text of one token
            found = size - (farthest - FAR)  # some tables begin a few entries before position 0
            self.positions = found if self.positions is None else min(self.positions, found)
        return index.clamp(max=size - 1)
