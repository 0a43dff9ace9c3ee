"""`HeadPerToken`: base class of drafters that have a separate head, with its own LM head, for each drafted token.

Medusa and Hydra are of this kind. Their checkpoints' names are translated to specdec's here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from specdec.heads.config_fields import Field

Names = Sequence[tuple[re.Pattern[str], str]]  # patterns of a checkpoint's names, each with the specdec name


@dataclass(frozen=True)
class PerTokenConfig:
    """Number and shape of the heads.

    Attributes:
        hidden_size: H, width of the target's states.
        vocab_size: V, size of the target's vocabulary.
        drafted: number of heads, one per drafted token.
        num_layers: residual blocks per head.
    """

    hidden_size: int
    vocab_size: int
    drafted: int
    num_layers: int

    @property
    def mask_token_id(self) -> None:
        return None

    @property
    def target_hidden_size(self) -> int:
        return self.hidden_size

    @property
    def embedding_size(self) -> int:
        return self.hidden_size


class HeadPerToken(nn.Module):
    """Base class of drafters whose heads have their own LM heads over the target's whole vocabulary."""

    embed_tokens = None
    draft_to_target = None
    heads: nn.ModuleList

    @property
    def lm_head(self) -> nn.ModuleList:
        """The heads. A value other than None says that no LM head is borrowed."""
        return self.heads

    @property
    def device(self) -> torch.device:
        return next(self.heads.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.heads.parameters()).dtype


def our_names(names: Iterable[str], rules: Names) -> dict[str, str]:
    """Map a checkpoint's names to specdec's. Names that match no rule stay as they are."""
    return {
        name: next((found.expand(to) for rule, to in rules if (found := rule.fullmatch(name))), name) for name in names
    }


def once(folder: Path, ours: dict[str, str]) -> None:
    """Raise ValueError if two tensors have the same specdec name."""
    by_ours: dict[str, str] = {}
    for name, known in ours.items():
        if known in by_ours:
            raise ValueError(f"{folder}: two tensors map to {known}: {by_ours[known]} and {name}")
        by_ours[known] = name


def counted(known: PerTokenConfig, heads: int | None, layers: int | None) -> list[Field]:
    """Return the facts that the weights show, noting where the config gives another number of heads or blocks."""
    fields = []
    for name, count, said in (("drafted", known.drafted, heads), ("num_layers", known.num_layers, layers)):
        fields.append(Field(name, count, "weights", f"the config says {said}" if said not in (None, count) else ""))
    return [*fields, *(Field(name, getattr(known, name), "weights") for name in ("hidden_size", "vocab_size"))]
