"""`MedusaHeads`: each drafts one of the next tokens from the target's last state alone. Medusa, 2401.10774.

Owns the module, its checkpoints and how it runs: nothing is kept between rounds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specdec.heads.block import Block
from specdec.heads.checkpoint import Understood, check_shapes, filled
from specdec.heads.config_fields import read_head_config
from specdec.heads.files import folder_of, read_tensors
from specdec.heads.per_token import HeadPerToken, PerTokenConfig, counted, once, our_names
from specdec.models.hidden_states import FINAL

# Names in Medusa's own files and in vLLM's, and what they are in ours.
NAMES = (
    (re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.linear\.(weight|bias)"), r"heads.\1.blocks.\2.\3"),
    (re.compile(r"(?:medusa_head\.)?(\d+)\.\d+\.weight"), r"heads.\1.lm_head.weight"),
    (re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)"), r"heads.\1.blocks.\2.\3"),
    (re.compile(r"lm_heads\.(\d+)\.weight"), r"heads.\1.lm_head.weight"),
)


@dataclass(frozen=True)
class MedusaConfig(PerTokenConfig):
    """bias: the residual blocks have one."""

    bias: bool = True

    @property
    def own_embedding(self) -> bool:
        return True  # it needs none

    def taps(self, num_target_layers: int) -> tuple[int, ...]:
        return (FINAL,)


class MedusaHead(nn.Module):
    """Residual blocks, and an LM head."""

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
    """Head i drafts the token i + 2 behind the one whose state it reads: the one behind it is chosen already."""

    def __init__(self, config: MedusaConfig):
        super().__init__()
        self.config = config
        self.heads = nn.ModuleList(MedusaHead(config) for _ in range(config.drafted))

    def forward(self, h: Tensor) -> Tensor:
        """Logits (B, D, V) from the target's states (B, H)."""
        return torch.stack([head(h) for head in self.heads], 1)


class MedusaRunner:
    """Runs the heads beside a target, over the rows of a batch."""

    block: Block

    def __init__(self, head: MedusaHeads, fast: MedusaHeads):
        self.head, self._fast = head, fast

    def start(self, batch_size: int) -> None:
        """Nothing is kept."""

    @torch.no_grad()
    def extend(self, tokens: Tensor, states: Tensor, pads: Sequence[int]) -> Tensor:
        """Draft a block from each row's last state; logits (B, 1, V) of its first place. See `Follower.extend`."""
        self.block = Block(self._fast(states[:, -1].to(self.head.device, self.head.dtype)))
        return self.block.logits[:, :1]

    def behind(self, depth: int, tokens: Tensor, above: Tensor | None) -> Tensor:
        """Logits (B, n, V) behind n tokens (B, n) at this depth of the draft, see `Block.behind`."""
        return self.block.behind(depth, tokens, above)[0]

    def drop_draft(self) -> None:
        """Nothing is kept."""


@dataclass(frozen=True)
class MedusaCheckpoint(Understood):
    """Of Medusa's heads."""

    config: MedusaConfig  # type: ignore[assignment]

    def head(self) -> MedusaHeads:
        with torch.device("meta"):
            head = MedusaHeads(self.config)
        return filled(head, self.weights, self.path)

    @property
    def borrowed(self) -> list[str]:
        return []


def is_medusa(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of Medusa's heads."""
    return "medusa_num_heads" in config or config.get("model_type") == "medusa"


def read(path: str | Path) -> MedusaCheckpoint:
    """Understand the checkpoint in a folder, or of a hub id (downloaded first). The weights say all of it."""
    folder = folder_of(path)
    config = read_head_config(folder)
    tensors = read_tensors(folder, "medusa*.pt")
    ours = our_names(tensors, NAMES)
    once(folder, ours)
    weights = {ours[name]: tensor for name, tensor in tensors.items()}
    check_shapes(folder, weights)
    used = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    heads = [name for name in weights if name.endswith("lm_head.weight")]
    if "heads.0.lm_head.weight" not in weights:
        raise ValueError(f"{folder} holds no Medusa heads with LM heads of their own")
    vocab, hidden = weights["heads.0.lm_head.weight"].shape
    blocks = sum(name.startswith("heads.0.blocks.") and name.endswith("weight") for name in weights)
    known = MedusaConfig(hidden, vocab, len(heads), blocks, "heads.0.blocks.0.bias" in weights)
    said = config.get("medusa_num_heads", config.get("num_heads"))
    fields = counted(known, said, None)
    return MedusaCheckpoint(folder, "Medusa", known, tuple(fields), used, {}, weights)
