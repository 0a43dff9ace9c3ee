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

from specdec.cache import Span
from specdec.rows import Sight
from specdec.source import takes_positions
from specdec.view import twin, view

M = TypeVar("M", bound=PreTrainedModel)
COUNTED = "past_key_values_length"  # what embeddings of positions count on from
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


def with_positions(model: M, places: Places) -> M:
    """A view of `model`, by its weights, that looks into `places`; `model` itself where that is told its positions, or
    nothing in it counts tokens."""
    if takes_positions(model):
        return model

    def swap(module: nn.Module) -> nn.Module:
        kind = _placed_class(type(module))  # type: ignore[arg-type]  # a class is hashable, whatever its instances are
        if kind is None:
            return module
        placed = twin(module, kind)
        placed.places = places  # type: ignore[assignment]
        return placed

    return view(model, swap)


@cache
def _placed_class(kind: type[nn.Module]) -> type[nn.Module] | None:
    parameters = list(inspect.signature(kind.forward).parameters)
    # Whole inputs' embeddings, as BERT has them, count on, too; those of positions alone are told how many first.
    if COUNTED in parameters and parameters[1] in HOW_MANY:
        return type(kind.__name__, (_Embedding, kind), {})
    bias = getattr(kind, "compute_bias", None)
    if bias is not None and list(inspect.signature(bias).parameters) == OF_BIAS:
        return type(kind.__name__, (_Bias, kind), {})
    return None


def _first_argument(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Any]:
    name = next(iter(inspect.signature(function).parameters))
    return name, args[0] if args else kwargs[name]


class _Embedding(nn.Module):
    places: Places

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
        first, given = _first_argument(super().forward, args, kwargs)
        if first == "input_ids_shape":
            return super().forward(torch.Size((1, count))).reshape(count, -1)[positions]

        def of(token: int) -> Tensor:
            text = torch.full_like(given[:1, :1], token).expand(1, count)
            return super(_Embedding, self).forward(text).reshape(count, -1)[positions]

        real = of(int(padding == 0))
        return real if padding is None else torch.where((given == padding)[..., None], of(padding), real)


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
