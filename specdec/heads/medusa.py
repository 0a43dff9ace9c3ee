"""`MedusaHeads`: each head drafts one of the next tokens from the target's last state alone. Medusa, 2401.10774.

This module holds the heads, their checkpoints and their runner, which keeps no state between rounds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specdec.heads.block import Block, BlockDrafts
from specdec.heads.checkpoint import HeadCheckpoint, rename_tensors
from specdec.heads.config_fields import read_head_config
from specdec.heads.files import folder_of, read_tensors
from specdec.heads.per_token import HeadPerToken, PerTokenConfig, shape_facts
from specdec.models.hidden_states import FINAL

# Parameter names in Medusa's own files and in vLLM's, each with the specdec name.
RULES = (
    (re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.linear\.(weight|bias)"), r"heads.\1.blocks.\2.\3"),
    (re.compile(r"(?:medusa_head\.)?(\d+)\.\d+\.weight"), r"heads.\1.lm_head.weight"),
    (re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)"), r"heads.\1.blocks.\2.\3"),
    (re.compile(r"lm_heads\.(\d+)\.weight"), r"heads.\1.lm_head.weight"),
)


@dataclass(frozen=True)
class MedusaConfig(PerTokenConfig):
    """Number and shape of Medusa heads.

    Attributes:
        bias: whether the linear layers of the residual blocks have a bias.
    """

    bias: bool = True

    own_embedding = True  # Medusa heads read no embedding

    def taps(self, num_target_layers: int) -> tuple[int, ...]:
        return (FINAL,)


class MedusaHead(nn.Module):
    """Residual blocks followed by an LM head."""

    def __init__(self, config: MedusaConfig):
        super().__init__()
        H = config.hidden_size
        self.blocks = nn.ModuleList(nn.Linear(H, H, bias=config.bias) for _ in range(config.num_layers))
        self.lm_head = nn.Linear(H, config.vocab_size, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = h + nn.functional.silu(block(h))
        return self.lm_head(h)


class MedusaHeads(HeadPerToken):
    """Medusa heads. Head i reads the state at token j and drafts token j + i + 2: token j + 1 is already known."""

    def __init__(self, config: MedusaConfig):
        super().__init__()
        self.config = config
        self.heads = nn.ModuleList(MedusaHead(config) for _ in range(config.drafted))

    def forward(self, h: Tensor) -> Tensor:
        """Return logits (B, D, V) for the target's states (B, H)."""
        return torch.stack([head(h) for head in self.heads], 1)


class MedusaRunner(BlockDrafts):
    """Runs Medusa heads next to a target, over the rows of a batch."""

    def __init__(self, head: MedusaHeads, fast: MedusaHeads):
        self.head, self._fast = head, fast

    def start(self, batch_size: int) -> None:
        """Do nothing: there is no cache."""

    @torch.no_grad()
    def extend(self, tokens: Tensor, states: Tensor, pads: Sequence[int]) -> Tensor:
        """Draft a block from each row's last state. Returns the logits (B, 1, V) of its first token.

        See `Follower.extend`.
        """
        self.block = Block(self._fast(states[:, -1].to(self.head.device, self.head.dtype)))
        return self.block.logits[:, :1]

    def drop_draft(self) -> None:
        """Do nothing: there is no cache."""


def is_medusa(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json describes Medusa heads."""
    return "medusa_num_heads" in config or config.get("model_type") == "medusa"


def read(path: str | Path) -> HeadCheckpoint[MedusaHeads]:
    """Read the checkpoint in a folder or on the hub (downloaded first). The config follows from the weights alone."""
    folder = folder_of(path)
    config = read_head_config(folder)
    weights, used, ignored = rename_tensors(read_tensors(folder, "medusa*.pt"), folder, RULES, {})
    if "heads.0.lm_head.weight" not in weights:
        raise ValueError(f"{folder} holds no Medusa heads with their own LM heads: heads.0.lm_head.weight is missing")
    vocab, hidden = weights["heads.0.lm_head.weight"].shape
    heads = sum(name.endswith("lm_head.weight") for name in weights)
    blocks = sum(name.startswith("heads.0.blocks.") and name.endswith("weight") for name in weights)
    c = MedusaConfig(hidden, vocab, heads, blocks, "heads.0.blocks.0.bias" in weights)
    fields = shape_facts(c, config.get("medusa_num_heads", config.get("num_heads")), None)
    return HeadCheckpoint(MedusaHeads, folder, "Medusa", c, fields, used, ignored, weights)
