"""`HeadPerToken`: a head of its own, with an LM head of its own, for each token of a draft (Medusa, Hydra).

Owns what such heads have in common, and the way from their checkpoints' names to ours.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from specdec.heads.config_fields import Field

Names = Sequence[tuple[re.Pattern[str], str]]  # a rule for a checkpoint's name, and what it is in ours


@dataclass(frozen=True)
class PerTokenConfig:
    """How many heads there are, and of what shape.

    Attributes:
        hidden_size: H, the target's. vocab_size: V. drafted: heads. num_layers: residual blocks of each.
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
    """What borrows no LM head, and drafts any of the target's tokens."""

    embed_tokens = None
    draft_to_target = None
    heads: nn.ModuleList

    @property
    def lm_head(self) -> nn.ModuleList:
        """It borrows none."""
        return self.heads

    @property
    def device(self) -> torch.device:
        return next(self.heads.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.heads.parameters()).dtype


def our_names(names: Iterable[str], rules: Names) -> dict[str, str]:
    """By the checkpoint's names, ours; those that no rule knows stay."""
    return {
        name: next((found.expand(to) for rule, to in rules if (found := rule.fullmatch(name))), name) for name in names
    }


def once(folder: Path, ours: dict[str, str]) -> None:
    """Raises ValueError where two tensors are the same of ours."""
    by_ours: dict[str, str] = {}
    for name, known in ours.items():
        if known in by_ours:
            raise ValueError(f"{folder}: two tensors are {known}: {by_ours[known]} and {name}")
        by_ours[known] = name


def counted(known: PerTokenConfig, heads: int | None, layers: int | None) -> list[Field]:
    """What the weights say, and where a config says otherwise of the number of heads and of their blocks."""
    fields = []
    for name, count, said in (("drafted", known.drafted, heads), ("num_layers", known.num_layers, layers)):
        fields.append(Field(name, count, "weights", f"the config says {said}" if said not in (None, count) else ""))
    return [*fields, *(Field(name, getattr(known, name), "weights") for name in ("hidden_size", "vocab_size"))]
