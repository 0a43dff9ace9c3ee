"""`HeadPerToken`: base class of drafters with a head for each drafted token, as Medusa's and Hydra's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from specdec.heads.config_fields import Field


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

    own_head = True
    mask_token_id = None

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


def shape_facts(config: PerTokenConfig, heads: int | None, layers: int | None) -> list[Field]:
    """Return the facts that the weights show, noting where the config gives another number of heads or blocks."""
    stated = {"drafted": heads, "num_layers": layers, "hidden_size": None, "vocab_size": None}
    facts = []
    for name, number in stated.items():
        value = getattr(config, name)
        facts.append(Field(name, value, "weights", "" if number in (None, value) else f"the config says {number}"))
    return facts
