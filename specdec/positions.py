"""`with_positions`: a view of a model whose tokens stand where a pass places them, not where its cache ends.

Models without an argument for positions (BART, Marian, T5) count on from the cache's length. That is right for one
row's chain and wrong for trees and ragged rows. What knows positions there, their embeddings and T5's biases, is asked
what it says of a plain text; of that a pass takes what belongs to its tokens.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.compat import CACHE_LENGTHS
from specdec.rows import Sight
from specdec.slots import Span
from specdec.source import takes_positions
from specdec.view import twin, view

M = TypeVar("M", bound=PreTrainedModel)
HOW_MANY = ("input_ids", "input_ids_shape", "input")
OF_BIAS = ["self", "query_length", "key_length", "device", "past_seen_tokens"]


class Places:
    """Of the pass that is run.

    Attributes:
        sight: where its tokens stand, and those that they see. None: as the model itself counts.
        pads: of each row, which such a model counts as well; (B, 1) int64 on the host.
    """

    sight: Sight | None = None
    pads: Tensor | None = None


def counts_positions(model: PreTrainedModel) -> bool:
    """It is told no positions, and something in it counts tokens in a way that is known here."""
    return not takes_positions(model) and any(map(_placed, model.modules()))


def padding_counted_by(model: PreTrainedModel) -> set[int]:
    """Padding tokens by which such a model numbers a prompt that it reads at once: it leaves them out (M2M100)."""
    if not counts_positions(model):
        return set()
    numbering = [module for module in model.modules() if hasattr(module, "create_position_ids_from_input_ids")]
    return {module.padding_idx for module in numbering if getattr(module, "padding_idx", None) is not None}


def with_positions(model: M, places: Places) -> M:
    """A view of `model`, by its weights, that looks into `places`; `model` itself where `counts_positions` says no."""
    if takes_positions(model):
        return model

    def swap(module: nn.Module) -> nn.Module:
        kind = _placed(module)
        if kind is None:
            return module
        placed = twin(module, kind)
        placed.places = places  # type: ignore[assignment]
        return placed

    return view(model, swap)


def _placed(module: nn.Module) -> type[nn.Module] | None:
    return _placed_class(type(module))  # type: ignore[arg-type]  # a class is hashable, whatever its instances are


@cache
def _placed_class(kind: type[nn.Module]) -> type[nn.Module] | None:
    parameters = list(inspect.signature(kind.forward).parameters)
    # Whole inputs' embeddings, as BERT has them, count on, too; those of positions alone are told how many first.
    if not set(CACHE_LENGTHS).isdisjoint(parameters) and parameters[1] in HOW_MANY:
        return type(kind.__name__, (_Embedding, kind), {"told": parameters[1]})
    bias = getattr(kind, "compute_bias", None)
    if bias is not None and list(inspect.signature(bias).parameters) == OF_BIAS:
        return type(kind.__name__, (_Bias, kind), {})
    return None


class _Embedding(nn.Module):
    places: Places
    told: str  # the first argument: the tokens, or their shape

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        sight, pads = self.places.sight, self.places.pads
        if sight is None:
            return super().forward(*args, **kwargs)
        positions, count = sight.positions, sight.cache.end
        if pads is not None:
            positions, count = positions + pads.to(positions.device), count + int(pads.max())
        known: Any = getattr(self, "num_embeddings", None)
        if known is not None:  # a tree may have more nodes than are left
            count = min(count, known - getattr(self, "offset", 0))
        positions = positions.clamp(max=count - 1)
        padding = getattr(self, "padding_idx", None)

        def of_text(token: int) -> Tensor:
            """What it says of a text of one token, at the pass's positions."""
            text = torch.full((1, count), token, device=positions.device)
            told = text.shape if self.told == "input_ids_shape" else text
            return super(_Embedding, self).forward(told).reshape(count, -1)[positions]

        real = of_text(1 if padding == 0 else 0)
        tokens = args[0] if args else kwargs.get(self.told)
        if padding is None or not isinstance(tokens, Tensor) or tokens.dim() != 2:  # embeddings were given, or a shape
            return real
        return torch.where((tokens == padding)[..., None], of_text(padding), real)


class _Bias(nn.Module):
    places: Places

    def compute_bias(self, query_length: int, key_length: int, device: Any = None, past_seen_tokens: int = 0) -> Tensor:
        """(B, heads, n, S) of the tokens of a pass and what they see."""
        sight, native = self.places.sight, super().compute_bias  # type: ignore[misc]
        if sight is None:
            return native(query_length, key_length, device=device, past_seen_tokens=past_seen_tokens)
        farthest = sight.cache.end - 1
        by_nearness = native(1, farthest + 1, device=device, past_seen_tokens=farthest)[0, :, 0]  # (heads, ...)
        distance = sight.positions[:, :, None] - sight.held(Span())[:, None]  # (B, n, S)
        nearness = farthest - distance.clamp(0, farthest)
        return by_nearness[:, nearness.to(by_nearness.device)].transpose(0, 1)
