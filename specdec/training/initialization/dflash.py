"""`initialize_block`: a fresh drafter of blocks for a target, which starts out from what the target knows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.heads.dflash.config import DFlashConfig
from specdec.heads.dflash.head import DFlashHead
from specdec.training.initialization.eagle3 import shape_for, start_out
from specdec.utils.choices import HeadKind

LAYERS = 2
RANK = 16  # of the Markov head, so many times smaller than the drafter's width: 256 of 4096, as DeepSpec's


def initialize_block(
    target: PreTrainedModel, draft_vocab: Tensor, mask_token_id: int, kind: HeadKind, drafted: int, **changes: Any
) -> DFlashHead:
    """A fresh drafter.

    Args:
        draft_vocab: (K,) int64 ascending, the target's ids that it can draft. The others: see `block_config_for`.
    """
    head = DFlashHead(block_config_for(target, len(draft_vocab), mask_token_id, kind, drafted, **changes))
    start_out(head, target, draft_vocab)
    with torch.no_grad():
        if head.markov_head is not None:
            nn.init.normal_(head.markov_head.markov_w1.weight, std=0.02)
            nn.init.zeros_(head.markov_head.markov_w2.weight)
        if head.confidence_head is not None:
            nn.init.zeros_(head.confidence_head.proj.weight)
    return head


def block_config_for(
    target: PreTrainedModel, draft_vocab_size: int, mask_token_id: int, kind: HeadKind, drafted: int, **changes: Any
) -> DFlashConfig:
    """Of a fresh drafter, of Qwen3's kind of layers, as other engines know it.

    Args:
        mask_token_id: an id of the target's that texts do without. drafted: tokens of a pass.
        kind: "dflash", whose blocks are an anchor and a mask for each drafted token; "dspark", whose anchor drafts,
            too, with a Markov and a confidence head.
        changes: of `DFlashConfig`'s fields; by default a layer is like one of the target's.
    """
    shape = {"qk_norm": True, "own_head": True, "num_layers": LAYERS} | shape_for(target, draft_vocab_size) | changes
    if kind == "dspark":
        rank = max(1, shape["hidden_size"] // RANK)
        further = {"markov": "vanilla", "markov_rank": rank, "confidence": True, "confidence_with_markov": True}
        shape = {"block_size": drafted, "from_anchor": True} | further | shape
    windows = (None,) * shape["num_layers"]
    return DFlashConfig(**{"block_size": drafted + 1, "windows": windows, "mask_token_id": mask_token_id} | shape)
