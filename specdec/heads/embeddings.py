"""Embedding and LM head that a draft head borrows from its target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.models.introspection import is_sharded
from specdec.models.views import whole


class Borrower(Protocol):
    """A head that may have no embedding of its own."""

    embed_tokens: Any

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...


@dataclass(frozen=True)
class BorrowedEmbeddings:
    """What a head has not of its own and borrows of its target: the embedding, EAGLE-1 heads the LM head too."""

    embedding: nn.Module | None
    lm_head: nn.Module | None

    @classmethod
    def by(cls, target: PreTrainedModel, head: nn.Module) -> BorrowedEmbeddings:
        """Copies, where the target's weights lie in several processes: then all of them must ask."""
        embeddings = [
            target.get_input_embeddings() if head.embed_tokens is None else None,
            target.get_output_embeddings() if head.lm_head is None else None,
        ]
        return cls(*(module and whole(module) for module in embeddings) if is_sharded(target) else embeddings)

    def embedded(self, tokens: Tensor, head: Borrower, normed: bool = True) -> Tensor:
        """(B, n, H) of tokens (B, n) int64, by the head's own embedding if it has one; its device and precision.

        normed: see `embed_tokens`.
        """
        embedding: Any = self.embedding if head.embed_tokens is None else head.embed_tokens
        assert embedding is not None
        weight = next(embedding.parameters())
        if head.embed_tokens is not None:  # it may lack a target's padding tokens
            tokens = tokens.clamp(max=weight.shape[0] - 1)
        tokens = beside(weight, tokens)
        return embed_tokens(embedding, tokens, normed).to(head.device, head.dtype)


def embed_tokens(embedding: nn.Module, tokens: Tensor, normed: bool = True) -> Tensor:
    """Embeddings of tokens; normed: by a module that norms what it looks up as that does it, else without."""
    if not normed and hasattr(embedding, "embed_norm"):
        return nn.functional.embedding(tokens, next(embedding.parameters()))
    return embedding(tokens)


def beside(weight: Tensor, tensor: Tensor) -> Tensor:
    """On the weight's device; where it is fetched for each pass (accelerate's offloading), its hook sees to that."""
    return tensor if weight.device.type == "meta" else tensor.to(weight.device)
