"""`unroll`: the head's drafts after every position of a text at once, as training and simulation need them.

The training-time test of EAGLE-3 (2503.01840, section 3.2). Step 0 sees the target's states; step j, in their place,
what the head itself put out at step j-1, and attends to the keys of step 0 up to its position and to its own of each
step before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import DynamicCache

from specdec.eagle3.head import Eagle3Head

Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (row, attention head, query, key) -> whether it sees it


def unroll(
    head: Eagle3Head,
    embeds: Tensor,
    states: Tensor,
    steps: int,
    documents: Tensor | None = None,
    *,
    flex: bool = False,
) -> Iterator[Tensor]:
    """What the head puts out at each step, given the true tokens.

    Args:
        embeds: (B, T, H) of the text's tokens 0 to T-1. states: (B, T, taps * target H) of the same tokens.
        steps: drafted tokens. documents: (B, T) int64, texts packed in one row do not see each other.
        flex: use flex attention, which skips what is masked and keeps no scores (CUDA; elsewhere only its slow
            reference runs); else a dense mask, (B, T, steps * T) at the last step.

    Yields:
        For step j (B, T - 1 - j, H): row i drafts token i + 2 + j, after true states up to token i and true tokens up
        to i + 1 + j.
    """
    B, T, _ = embeds.shape
    L = T - 1  # rows: the last token has no successor to pair with
    documents = embeds.new_zeros(B, T, dtype=torch.long) if documents is None else documents
    documents = documents[:, :L]
    row = torch.arange(L, device=embeds.device)
    begins = torch.nn.functional.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    position = row - (row * begins).cummax(-1).values  # each text has its own
    features = head.fuse(states[:, :L])
    cache = DynamicCache()
    for step in range(steps):
        shifted = torch.nn.functional.pad(embeds[:, 1 + step :], (0, 0, 0, step))  # behind the text: never scored
        sees = _mask(documents, position, step, head.config.sliding_window)
        keys = L * (step + 1)
        visible: Tensor | BlockMask
        if flex:
            visible = create_block_mask(sees, B, None, L, keys, device=str(embeds.device))
        else:
            b, q, k = (torch.arange(n, device=embeds.device) for n in (B, L, keys))
            visible = sees(b[:, None, None], b[:1], q[:, None], k)
        features = head(shifted, features, position + step, visible, cache)
        yield features[:, : L - step]


def _mask(documents: Tensor, position: Tensor, step: int, window: int | None) -> Mask:
    """Keys of step 0 up to the query's position, and of each later step the query's own one."""
    L = documents.shape[1]

    def sees(b: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        earlier, j = k // L, k % L
        before = (j <= q) & (documents[b, j] == documents[b, q])
        visible = torch.where(earlier == 0, before, j == q)
        if window is None:
            return visible
        return visible & (position[b, q] + step - position[b, j] - earlier < window)

    return sees
