"""`ModelRunner`: runs a Hugging Face causal LM over chunks and draft trees of a batch of ragged rows.

Owns the cache, the positions and the masks. Knows nothing of sampling or of where a draft came from. The target and a
draft model both run through it.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.cache import SpeculativeCache

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


@dataclass(frozen=True)
class Output:
    """Logits (B, n, V) of the kept tokens and, if asked for, the hidden states, one (B, n, H) per layer."""

    logits: Tensor
    hidden_states: tuple[Tensor, ...] | None = None


class ModelRunner:
    """One model, one cache, three verbs: `extend` the rows, `grow` a draft behind them, `commit` a part of it.

    Args:
        model: a decoder-only causal LM from transformers, in eval mode.
        masks: how the model takes an attention mask: "dict" (keyed by layer type), "tensor", or "own" when it can
            only build its own, which restricts it to chains of rows of one length.
    """

    def __init__(self, model: PreTrainedModel, masks: str | None = None):
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        self.masks = masks or default_masks(model)
        self.cache = SpeculativeCache(0)
        self.pending = 0  # draft nodes written behind the rows and not committed
        parameters = forward_parameters(model)
        self._takes_positions = "position_ids" in parameters
        self._takes_logits_to_keep = "logits_to_keep" in parameters

    @property
    def lengths(self) -> list[int]:
        return self.cache.lengths

    def start(self, batch_size: int) -> None:
        """Forget everything; the next rows are `batch_size` empty ones."""
        self.cache = SpeculativeCache(batch_size)
        self.pending = 0

    @torch.no_grad()
    def extend(
        self,
        tokens: Tensor | None,
        pads: Sequence[int],
        *,
        embeds: Tensor | None = None,
        hidden_states: bool = False,
    ) -> Output:
        """Append known tokens to the rows and commit them.

        Args:
            tokens: (B, W) int64, row b left-padded by `pads[b]`.
            embeds: (B, W, H) in their place.

        Returns:
            Logits (B, 1, V) after each row's last token; hidden states over all W.
        """
        given = embeds if embeds is not None else tokens
        assert given is not None
        B, W = given.shape[:2]
        if not any(pads) and self._aligned():
            self.cache.place(0, W)
            positions = self.lengths[0] + torch.arange(W, device=given.device).expand(B, W)
            own = self.masks == "own" or self.lengths[0] == 0  # a whole prompt takes the model's causal fast path
            visible = None if own else self._causal(positions, self.cache._end)
        else:
            self._require_masks()
            pad = torch.tensor(list(pads), device=given.device)[:, None]
            order = torch.arange(W, device=given.device) - pad  # (B, W) negative for padding
            base = torch.tensor(self.lengths, device=given.device)[:, None]
            # Padding rotates behind the row: its slots are never committed and soon overwritten.
            self.cache.place(0, W, slots=base + order.remainder(W))
            positions = base + order.clamp(min=0)
            visible = self._causal(positions, self.cache._end)
        output = self._forward(tokens, embeds, positions, visible, key_positions=None, keep=1, hidden=hidden_states)
        self.cache.commit([W - pad for pad in pads])
        return output

    @torch.no_grad()
    def grow(
        self, tokens: Tensor, depth: Tensor, ancestors: Tensor, *, chain: bool = False, hidden_states: bool = False
    ) -> Output:
        """Write n draft nodes behind the rows (and behind nodes already pending) and run the model over them.

        Args:
            tokens: (B, n) int64.
            depth: (B, M + n) int64, of the M pending nodes and these: position = length + depth.
            ancestors: (B, n, M + n) bool, which of all these nodes each of the n sees.
            chain: the nodes form one path in order, in every row.

        Returns:
            Logits (B, n, V).
        """
        n, aligned = tokens.shape[1], self._aligned()
        self._require_masks(unless=chain and aligned)
        base = torch.tensor(self.lengths, device=tokens.device)[:, None]
        positions = base + depth[:, self.pending :]
        slots = None if aligned else base + self.pending + torch.arange(n, device=tokens.device)
        self.cache.place(self.pending, n, slots)
        # Also for a single token, where no mask would do: without one sdpa takes its slow GQA path on CPUs (1290
        # against 102 us a layer for one token, 12 heads over 2, 1000 slots).
        visible = key_positions = None
        if self.masks != "own" and chain and aligned and n == 1:
            visible = torch.ones(len(tokens), 1, self.cache._end, dtype=torch.bool, device=tokens.device)
        elif self.masks != "own":
            visible, key_positions = self._tree_mask(base, depth, ancestors, self.cache._end)
        output = self._forward(tokens, None, positions, visible, key_positions, keep=n, hidden=hidden_states)
        self.pending += n
        return output

    def commit(self, growth: Sequence[int], path: Tensor | None = None) -> None:
        """Keep the first `growth[b]` of the pending nodes, or of `path` (B, D) through them; forget the others."""
        self.cache.commit(growth, path)
        self.pending = 0

    def truncate(self, lengths: Sequence[int]) -> None:
        """Roll each row back to at most `lengths[b]` tokens."""
        self.cache.lengths = [min(have, most) for have, most in zip(self.lengths, lengths, strict=True)]

    # Positions and masks

    def _aligned(self) -> bool:
        return len(set(self.lengths)) == 1

    def _require_masks(self, unless: bool = False) -> None:
        if self.masks == "own" and not unless:
            raise ValueError(
                f"{type(self.model).__name__} builds its own attention masks: it can run chains of rows of one length "
                "only, not trees or ragged batches"
            )

    def _causal(self, positions: Tensor, end: int) -> Tensor:
        """(B, W, end) bool: slots up to each token's own position."""
        return torch.arange(end, device=positions.device) <= positions[..., None]

    def _tree_mask(self, base: Tensor, depth: Tensor, ancestors: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """What each node sees: committed slots, and its ancestors in the draft.

        Returns:
            visible (B, n, end) bool and the position of each slot's token (B, end).
        """
        B, n, M = ancestors.shape
        slot = torch.arange(end, device=base.device)
        node = slot - base  # (B, end) the draft node in each slot, negative where committed
        in_draft = (node >= 0) & (node < M)
        index = node.clamp(0, M - 1)
        seen = ancestors.gather(2, index[:, None].expand(B, n, end)) & in_draft[:, None]
        visible = seen | (node < 0)[:, None]
        key_positions = torch.where(in_draft, base + depth.gather(1, index), slot)
        return visible, key_positions

    def _mask_argument(self, visible: Tensor, positions: Tensor, key_positions: Tensor | None) -> Any:
        """The model's `attention_mask`: one 4D mask, or one per layer type."""
        keys = (
            torch.arange(visible.shape[-1], device=visible.device) if key_positions is None else key_positions[:, None]
        )
        distance = positions[..., None] - keys  # (B, n, end)

        def of(layer_type: str) -> Tensor:
            mask = visible
            if layer_type == SLIDING:
                mask = visible & (distance < self.config.sliding_window)
            elif layer_type == CHUNKED:
                size = self.config.attention_chunk_size
                mask = visible & (positions[..., None] // size == keys // size)
            return self._as_implementation_wants(mask[:, None])

        if self.masks == "dict":
            return {layer_type: of(layer_type) for layer_type in set(self.config.layer_types)}
        return of(_uniform_layer_type(self.config))

    def _as_implementation_wants(self, mask: Tensor) -> Tensor:
        if self.config._attn_implementation == "sdpa":
            return mask
        # eager adds the mask to the scores: a boolean one would be silently wrong.
        dtype = self.model.dtype
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)

    def _forward(
        self,
        tokens: Tensor | None,
        embeds: Tensor | None,
        positions: Tensor,
        visible: Tensor | None,
        key_positions: Tensor | None,
        keep: int,
        hidden: bool,
    ) -> Output:
        inputs: dict[str, Any] = {"past_key_values": self.cache, "use_cache": True, "return_dict": True}
        inputs |= {"input_ids": tokens} if embeds is None else {"inputs_embeds": embeds}
        if visible is not None:
            inputs["attention_mask"] = self._mask_argument(visible, positions, key_positions)
        if self._takes_positions:
            inputs["position_ids"] = positions
        if self._takes_logits_to_keep:
            inputs["logits_to_keep"] = keep
        if hidden:
            inputs["output_hidden_states"] = True
        output = self.model(**inputs)
        return Output(output.logits[:, -keep:], output.hidden_states if hidden else None)


def forward_parameters(model: PreTrainedModel) -> set[str]:
    """Names that `model.forward` accepts."""
    return set(inspect.signature(model.forward).parameters)


def default_masks(model: PreTrainedModel) -> str:
    """How the model most likely takes masks; `capability.probe` finds out for sure."""
    return "dict" if getattr(model.config.get_text_config(decoder=True), "layer_types", None) else "tensor"


def _uniform_layer_type(config: Any) -> str:
    """The one kind of attention of a model without layer types (as masking_utils.create_masks_for_generate)."""
    types = set(getattr(config, "layer_types", None) or ())
    if len(types) == 1:
        return next(iter(types))
    if getattr(config, "sliding_window", None) is not None:
        return SLIDING
    return CHUNKED if getattr(config, "attention_chunk_size", None) is not None else FULL
