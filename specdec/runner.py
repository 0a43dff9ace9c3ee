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

from specdec.rows import CachedRows
from specdec.taps import Taps

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


@dataclass(frozen=True)
class Output:
    """Logits (B, n, V) of the kept tokens, and what else was asked for.

    Attributes:
        hidden_states: one (B, n, H) per layer. features: (B, W, C), the tapped states of all W tokens of the pass.
    """

    logits: Tensor
    hidden_states: tuple[Tensor, ...] | None = None
    features: Tensor | None = None


class ModelRunner(CachedRows):
    """One model, one cache, three verbs: `extend` the rows, `grow` a draft behind them, `commit` a part of it.

    Args:
        model: a decoder-only causal LM from transformers, in eval mode.
        masks: how the model takes an attention mask: "dict" (keyed by layer type), "tensor", or "own" when it can
            only build its own, which restricts it to chains of rows of one length.
        taps: hidden states to take along in every pass.
    """

    def __init__(self, model: PreTrainedModel, masks: str | None = None, taps: Taps | None = None):
        super().__init__()
        self.model, self.taps = model, taps
        self.config = model.config.get_text_config(decoder=True)
        self.masks = masks or default_masks(model)
        parameters = forward_parameters(model)
        self._takes_positions = "position_ids" in parameters
        self._takes_logits_to_keep = "logits_to_keep" in parameters

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
        W = given.shape[1]
        positions, visible = self.place_known(W, pads, given.device)
        if visible is not None:
            self._require_masks(unless=not any(pads) and self.aligned)
        if self.masks == "own":
            visible = None
        output = self._forward(tokens, embeds, positions, visible, key_positions=None, keep=1, hidden=hidden_states)
        self.commit([W - pad for pad in pads])
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
        n, alone = tokens.shape[1], chain and self.aligned
        self._require_masks(unless=alone)
        positions, visible, key_positions = self.place_draft(depth, ancestors, chain)
        # A mask also for a single token, where none would do: without one sdpa takes its slow GQA path on CPUs (1290
        # against 102 us a layer for one token, 12 heads over 2, 1000 slots).
        mask = None if self.masks == "own" else visible
        output = self._forward(tokens, None, positions, mask, key_positions, keep=n, hidden=hidden_states)
        self.pending += n
        return output

    # Masks

    def _require_masks(self, unless: bool = False) -> None:
        if self.masks == "own" and not unless:
            raise ValueError(
                f"{type(self.model).__name__} builds its own attention masks: it can run chains of rows of one length "
                "only, not trees or ragged batches"
            )

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
        if self.taps is None:
            output, features = self.model(**inputs), None
        else:
            with self.taps.listening() as taken:
                output = self.model(**inputs)
            features = self.taps.features(taken)
        return Output(output.logits[:, -keep:], output.hidden_states if hidden else None, features)


def device_of(model: PreTrainedModel) -> torch.device:
    """Where a model takes its inputs. One whose first weights accelerate keeps elsewhere calls itself "meta"."""
    if model.device.type != "meta":
        return model.device
    device = getattr(getattr(model.get_input_embeddings(), "_hf_hook", None), "execution_device", None)
    return model.device if device is None else torch.device(device)


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
