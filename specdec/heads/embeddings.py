"""`BorrowedEmbeddings`: token embedding and LM head that a draft head borrows from its target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.models.introspection import is_sharded
from specdec.models.views import whole


@dataclass(frozen=True)
class BorrowedEmbeddings:
    """Modules that a head borrows from its target because it has none of its own.

    Attributes:
        embedding: the target's token embedding, or None if the head has one.
        lm_head: the target's LM head, or None if the head has one.
    """

    embedding: nn.Module | None
    lm_head: nn.Module | None

    @classmethod
    def by(cls, target: PreTrainedModel, head: nn.Module) -> BorrowedEmbeddings:
        """Borrow from `target` what `head` lacks.

        If the target is sharded over several processes, the modules are copies, and every process must call this.
        """
        embeddings = [
            target.get_input_embeddings() if head.embed_tokens is None else None,
            target.get_output_embeddings() if head.lm_head is None else None,
        ]
        return cls(*(module and whole(module) for module in embeddings) if is_sharded(target) else embeddings)

    def embedded(self, tokens: Tensor, head: Any, normed: bool = True) -> Tensor:
        """Embed tokens with the head's own embedding if it has one, else with the target's.

        Args:
            tokens: (B, n) int64.
            head: a head with `embed_tokens`, which may be None, `device` and `dtype`.
            normed: see `embed_tokens`.

        Returns:
            (B, n, H), on the head's device and in its dtype.
        """
        embedding: Any = self.embedding if head.embed_tokens is None else head.embed_tokens
        assert embedding is not None
        weight = next(embedding.parameters())
        if head.embed_tokens is not None:  # the head may lack the target's padding tokens
            tokens = tokens.clamp(max=weight.shape[0] - 1)
        tokens = to_device_of(weight, tokens)
        return embed_tokens(embedding, tokens, normed).to(head.device, head.dtype)


def embed_tokens(embedding: nn.Module, tokens: Tensor, normed: bool = True) -> Tensor:
    """Embed tokens. If the module also norms its embeddings, `normed=False` skips that norm."""
    if not normed and hasattr(embedding, "embed_norm"):
        return nn.functional.embedding(tokens, next(embedding.parameters()))
    return embedding(tokens)


def apply_lm_head(lm_head: nn.Module, h: Tensor) -> Tensor:
    """Return the logits (..., V) of a target's LM head for its input (..., H), on the input's device."""
    weight = next(lm_head.parameters())
    return lm_head(to_device_of(weight, h.to(weight.dtype))).to(h.device)


def to_device_of(weight: Tensor, tensor: Tensor) -> Tensor:
    """Move a tensor to the weight's device. An offloaded weight (on "meta") has an accelerate hook that does it."""
    return tensor if weight.device.type == "meta" else tensor.to(weight.device)
