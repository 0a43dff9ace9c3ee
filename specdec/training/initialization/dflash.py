"""Initialization of a fresh block drafter from the target's weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.heads.dflash.config import DFlashConfig
from specdec.heads.dflash.head import DFlashHead
from specdec.training.initialization.eagle3 import initialize_weights, shape_for
from specdec.utils.choices import HeadKind

LAYERS = 2
RANK = 16  # ratio of the drafter's width to the Markov head's rank: 4096 to 256 in DeepSpec


def initialize_block(
    target: PreTrainedModel, draft_vocab: Tensor, mask_token_id: int, kind: HeadKind, drafted: int, **changes: Any
) -> DFlashHead:
    """Create a fresh block drafter.

    draft_vocab: (K,) int64 ascending, the target's token ids that can be drafted. Others: see `block_config_for`.
    """
    head = DFlashHead(block_config_for(target, len(draft_vocab), mask_token_id, kind, drafted, **changes))
    initialize_weights(head, target, draft_vocab)
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
    """Create the config of a fresh block drafter, with Qwen3's layers, which other engines support.

    Args:
        target: model to draft for.
        draft_vocab_size: number of tokens that can be drafted.
        mask_token_id: a token of the target that texts do not contain.
        kind: "dflash": a block is an anchor and a mask for each drafted token. "jetspec": the same with a causal mask
            within the block. "dspark": the anchor also drafts, with a Markov and a confidence head.
        drafted: tokens drafted per pass.
        changes: fields of `DFlashConfig`. By default a layer has the shape of one of the target's.
    """
    shape = {"qk_norm": True, "own_head": True, "num_layers": LAYERS} | shape_for(target, draft_vocab_size) | changes
    if kind == "dspark":
        rank = max(1, shape["hidden_size"] // RANK)
        further = {"markov": "vanilla", "markov_rank": rank, "confidence": True, "confidence_with_markov": True}
        shape = {"block_size": drafted, "from_anchor": True} | further | shape
    if kind == "jetspec":
        shape = {"causal": "all"} | shape
    windows = (None,) * shape["num_layers"]
    return DFlashConfig(**{"block_size": drafted + 1, "windows": windows, "mask_token_id": mask_token_id} | shape)
