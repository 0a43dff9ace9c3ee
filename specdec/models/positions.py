"""`with_positions`: a view of a model that takes its tokens' positions from the pass, not from its cache's length.

Models without a `position_ids` argument (BART, Marian, T5) count from the cache's length. That is right for a chain in
one row, and wrong for trees and ragged rows. The view computes their position embeddings, and T5's biases, for a plain
text, and picks those of the pass's tokens. It does the same with a causal mask that a layer keeps (GPT-Neo): in trees
and ragged rows its columns are not positions, and its length is fixed.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.models.cache.buffers import Span
from specdec.models.cache.ragged_rows import VisibleSlots
from specdec.models.compat import CACHE_LENGTHS
from specdec.models.introspection import takes_positions
from specdec.models.views import shallow_copy_as, view

M = TypeVar("M", bound=PreTrainedModel)
HOW_MANY = ("input_ids", "input_ids_shape", "input")
OF_BIAS = ["self", "query_length", "key_length", "device", "past_seen_tokens"]


class RowPositions:
    """Positions of the current pass.

    Attributes:
        visible_slots: positions of its tokens, and the slots that they see; None: the model counts by itself.
        pads: (B, 1) int64 on the host, padding of each row, which such a model counts as well.
    """

    visible_slots: VisibleSlots | None = None
    pads: Tensor | None = None


def counts_positions(model: PreTrainedModel) -> bool:
    """True if the model takes no `position_ids` but counts positions in a module that `with_positions` can replace."""
    return not takes_positions(model) and any(map(_placed, model.modules()))


def counted_positions(model: PreTrainedModel) -> int | None:
    """Number of positions, from 0 on, of the decoder of a model that counts them; None: unlimited."""
    encoder = set(model.get_encoder().modules()) if model.config.is_encoder_decoder else set()
    sizes = [_size(module) for module in model.modules() if module not in encoder and _placed(module)]
    return min((size for size in sizes if size is not None), default=None)


def padding_counted_by(model: PreTrainedModel) -> set[int]:
    """Padding tokens that a model skips when it counts the positions of a prompt read in one pass (M2M100)."""
    if not counts_positions(model):
        return set()
    numbering = [module for module in model.modules() if hasattr(module, "create_position_ids_from_input_ids")]
    return {module.padding_idx for module in numbering if getattr(module, "padding_idx", None) is not None}


def has_causal_masks(model: PreTrainedModel) -> bool:
    """True if layers keep causal masks of fixed length, which they apply in addition to the mask of a pass."""
    return any(map(_is_causal_mask, model.buffers()))


def with_positions(model: M, row_positions: RowPositions) -> M:
    """Return a view of `model` with the same weights that reads `row_positions`, or `model` if nothing in it counts."""
    counts = not takes_positions(model)
    if not counts and not has_causal_masks(model):
        return model

    def swap(module: nn.Module) -> nn.Module:
        kind = (_placed(module) if counts else None) or _masking(module)
        if kind is None:
            return module
        placed = shallow_copy_as(module, kind)
        placed.row_positions = row_positions  # type: ignore[assignment]
        return placed

    return view(model, swap)


def _is_causal_mask(buffer: Tensor | None) -> bool:
    """True for a square boolean mask (1, 1, P, P)."""
    return buffer is not None and buffer.dtype == torch.bool and buffer.dim() == 4 and len(set(buffer.shape[2:])) == 1


def _placed(module: nn.Module) -> type[nn.Module] | None:
    return _placed_class(type(module))  # type: ignore[arg-type]  # a class is hashable, whatever its instances are


@cache
def _placed_class(kind: type[nn.Module]) -> type[nn.Module] | None:
    if issubclass(kind, (_Embedding, _Bias)):  # already replaced: a view is made of a view
        return kind
    parameters = list(inspect.signature(kind.forward).parameters)
    # Embeddings of whole inputs, as in BERT, count as well. Those of positions alone first take the tokens or a shape.
    if not set(CACHE_LENGTHS).isdisjoint(parameters) and parameters[1] in HOW_MANY:
        return type(kind.__name__, (_Embedding, kind), {"argument": parameters[1]})
    bias = getattr(kind, "compute_bias", None)
    if bias is not None and list(inspect.signature(bias).parameters) == OF_BIAS:
        return type(kind.__name__, (_Bias, kind), {})
    return None


def _masking(module: nn.Module) -> type[nn.Module] | None:
    names = tuple(name for name, buffer in module._buffers.items() if _is_causal_mask(buffer))
    return _masking_class(type(module), names) if names else None  # type: ignore[arg-type]  # see `_placed`


@cache
def _masking_class(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    def placed(name: str) -> property:
        return property(lambda module: _CausalMask(module._buffers[name], module.row_positions))

    return type(kind.__name__, (kind,), {name: placed(name) for name in names})


def _size(module: Any) -> int | None:
    """Number of positions in a module's table; None: unlimited, as the table grows with the text."""
    return module.num_embeddings - getattr(module, "offset", 0) if isinstance(module, nn.Embedding) else None


class _Embedding(nn.Module):
    """Position embedding that returns the embeddings of the pass's positions."""

    row_positions: RowPositions
    argument: str  # the first argument: the tokens, or their shape

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        visible_slots, pads = self.row_positions.visible_slots, self.row_positions.pads
        if visible_slots is None:
            return super().forward(*args, **kwargs)
        positions, count = visible_slots.positions, visible_slots.cache.end
        if pads is not None:
            positions, count = positions + pads.to(positions.device), count + int(pads.max())
        size = _size(self)
        if size is not None:  # a tree may have more nodes than there are positions left
            count = min(count, size)
        padding = getattr(self, "padding_idx", None)

        def of_text(token: int) -> Tensor:
            """Embeddings of a text that repeats `token`, at the pass's positions."""
            text = torch.full((1, count), token, device=positions.device)
            argument = text.shape if self.argument == "input_ids_shape" else text
            return super(_Embedding, self).forward(argument).reshape(count, -1)[positions]

        real = of_text(1 if padding == 0 else 0)
        tokens = args[0] if args else kwargs.get(self.argument)
        if padding is None or not isinstance(tokens, Tensor) or tokens.dim() != 2:  # embeddings were given, or a shape
            return real
        return torch.where((tokens == padding)[..., None], of_text(padding), real)


class _Bias(nn.Module):
    """Relative attention bias (T5) between the pass's tokens and the slots that they see."""

    row_positions: RowPositions

    def compute_bias(self, query_length: int, key_length: int, device: Any = None, past_seen_tokens: int = 0) -> Tensor:
        """Return the biases (B, heads, n, S) between a pass's tokens and the slots that they see."""
        visible_slots, native = self.row_positions.visible_slots, super().compute_bias  # type: ignore[misc]
        if visible_slots is None:
            return native(query_length, key_length, device=device, past_seen_tokens=past_seen_tokens)
        farthest = visible_slots.cache.end - 1
        by_nearness = native(1, farthest + 1, device=device, past_seen_tokens=farthest)[0, :, 0]  # (heads, ...)
        distance = visible_slots.positions[:, :, None] - visible_slots.held(Span())[:, None]  # (B, n, S)
        nearness = farthest - distance.clamp(0, farthest)
        return by_nearness[:, nearness.to(by_nearness.device)].transpose(0, 1)


class _CausalMask:
    """A layer's own causal mask (1, 1, P, P), which may also limit its attention span.

    The layer indexes it by columns, of queries and then keys. It returns the entries at the pass's positions instead.
    """

    def __init__(self, mask: Tensor, row_positions: RowPositions):
        self.mask, self.row_positions = mask, row_positions

    def __getitem__(self, columns: tuple[slice, ...]) -> Tensor:
        """Return the mask (B, 1, n, S) bool of the pass."""
        visible_slots = self.row_positions.visible_slots
        if visible_slots is None:
            return self.mask[columns]
        last = self.mask.shape[-1] - 1  # slots after the rows may have larger numbers: no token sees them
        keys = visible_slots.held(Span())[:, None].clamp(max=last)
        return self.mask[0, 0][visible_slots.positions[..., None], keys][:, None]
