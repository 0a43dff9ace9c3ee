"""`unroll`: the head's drafts after every position of a text at once, as training and simulation need them.

The training-time test of EAGLE-3 (2503.01840, section 3.2). Step 0 sees the target's states; step j, in their place,
what the head itself put out at step j-1, and attends to the keys of step 0 up to its position and to its own of each
step before.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import DynamicCache

from specdec.eagle3.head import Eagle3Head


def unroll(
    head: Eagle3Head, embeds: Tensor, states: Tensor, steps: int, documents: Tensor | None = None
) -> Iterator[Tensor]:
    """What the head puts out at each step, given the true tokens.

    Args:
        embeds: (B, T, H) of the text's tokens 0 to T-1. states: (B, T, taps * target H) of the same tokens.
        steps: drafted tokens. documents: (B, T) int64, texts packed in one row do not see each other.

    Yields:
        For step j (B, T - 1 - j, H): row i drafts token i + 2 + j, after true states up to token i and true tokens up
        to i + 1 + j.
    """
    B, T, _ = embeds.shape
    L = T - 1  # rows: the last token has no successor to pair with
    device = embeds.device
    features = head.fuse(states[:, :L])
    row = torch.arange(L, device=device)
    causal = (row[None] <= row[:, None]).expand(B, L, L)
    position = row.expand(B, L)
    if documents is not None:  # each text sees itself alone and has positions of its own
        same = documents[:, :L, None] == documents[:, None, :L]
        causal = causal & same
        position = row - same.long().argmax(-1)
    diagonal = torch.eye(L, dtype=torch.bool, device=device).expand(B, L, L)
    cache, sees = DynamicCache(), causal
    window = head.config.sliding_window
    for step in range(steps):
        shifted = torch.nn.functional.pad(embeds[:, 1 + step :], (0, 0, 0, step))  # behind the text: never scored
        visible = sees
        if window is not None:  # keys of step s lie at position + s
            keys = torch.cat([position + earlier for earlier in range(step + 1)], -1)
            visible = sees & (position[..., None] + step - keys[:, None] < window)
        features = head(shifted, features, position + step, visible, cache)
        yield features[:, : L - step]
        sees = torch.cat([sees, diagonal], -1)
