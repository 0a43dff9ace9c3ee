"""`StateHead`: the base class of heads that read the target's hidden states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdec.heads.config import LayerConfig
from specdec.heads.rope import rotary_config
from specdec.models.cache.ragged_rows import pads_of_part

PROMPT = 16  # from this many known tokens on, only keys and values are computed for all but the last token
AT_ONCE = 1024  # known tokens per row and pass, which bounds the memory for activations


class StateHead(nn.Module):
    """Head whose linear layer `fc` reads the target's hidden states."""

    fc: nn.Linear

    def __init__(self, config: LayerConfig):
        super().__init__()
        with torch.device("cpu"):  # in a tuple, so that `head.to(bfloat16)` does not round the frequencies
            self._rotary = (LlamaRotaryEmbedding(rotary_config(config)),)

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    def move_frequencies(self) -> None:
        """Move the RoPE frequencies to the weights' device ahead of time. `head.to()` does not move them."""
        self._rotary[0].to(self.device)

    def rotation(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines for positions (B, n) int64, in the dtype of x."""
        return self._rotary[0].to(x.device)(x, positions)


def parts_of(width: int, ahead: int, pads: Sequence[int]) -> Iterator[tuple[slice, list[int]]]:
    """Split `width` columns of known tokens into the parts that a runner reads one after the other.

    Args:
        width: number of columns.
        ahead: columns in parts of at most `AT_ONCE`. The rest is one part.
        pads: left padding of each row.

    Yields:
        The columns of a part, and the padding of each row in it.
    """
    for start, end in pairwise(sorted({0, *range(0, ahead, AT_ONCE), ahead, width})):
        yield slice(start, end), pads_of_part(pads, start, end - start)


def prefill_width(width: int) -> int:
    """Return how many of `width` known tokens only need keys and values: in a prompt all but the last."""
    return width - 1 if width >= PROMPT else 0
