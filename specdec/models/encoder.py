"""`EncoderOutputs`: the encoder's outputs for a call's input, which the decoder reads in addition to its own text.

Maps the argument names of encoder-decoder models to those of a causal LM and back, so that a decoder runs as any causal
LM does.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from specdec.models.compat import cache_name
from specdec.models.introspection import PREFIX, decoders_name, forward_parameters

EXTRAS = ("output_router_logits", "output_hidden_states", "output_attentions")  # outputs of a pass besides its logits


@dataclass(frozen=True)
class EncoderOutputs:
    """Encoder outputs of B rows.

    Attributes:
        states: the encoder's output; its first entry has the states (B, S, H).
        mask: (B, S), attention mask of the states; None without padding.
        given: the encoder's input; None if the call passed `encoder_outputs` instead.
        keys: keys and values of cross-attention, by layer; the first pass fills them.
    """

    states: Any
    mask: Tensor | None = None
    given: Tensor | None = None
    keys: DynamicCache = field(default_factory=DynamicCache)

    def text(self, row: int) -> list[int]:
        """The tokens that the encoder read for a row of the batch; empty for audio and images."""
        if self.given is None or self.given.dim() != 2 or self.given.is_floating_point():
            return []
        tokens = self._of_rows(self.given)[row]
        return (tokens if self.mask is None else tokens[self.mask[row].bool()]).tolist()

    def _of_rows(self, given: Tensor) -> Tensor:
        """Repeat each row of the call for its `num_return_sequences` sequences."""
        return given.repeat_interleave(len(self.states[0]) // len(given), 0)

    def read_by(self, model: PreTrainedModel, inputs: dict[str, Any]) -> dict[str, Any]:
        """Add these encoder outputs to the arguments of a decoder pass of `model`, under its argument names."""
        named = {decoders_name(model, name): value for name, value in inputs.items()} | {"encoder_outputs": self.states}
        if model.config.is_encoder_decoder:
            named["attention_mask"] = self.mask
        name = cache_name(named)
        if name is not None and not isinstance(named[name], EncoderDecoderCache):
            named[name] = self.together_with(named[name])
        return named

    def readable_by(self, model: PreTrainedModel) -> bool:
        """Return False if a draft model's own encoder needs the input, but the call passed `encoder_outputs` alone.

        The same for embeddings, which are the target's.
        """
        if not model.config.is_encoder_decoder:
            return True
        return self.given is not None and not (
            self.given.is_floating_point() and model.get_encoder().main_input_name == "input_ids"
        )

    def for_model(self, model: PreTrainedModel) -> EncoderOutputs | None:
        """The encoder outputs that a draft model reads for the same input; None if it reads none.

        A decoder that reads the target's encoder states (distil-whisper) gets these, another model those of its own
        encoder. It must be able to read the input, see `readable_by`.
        """
        if not model.config.is_encoder_decoder:
            return EncoderOutputs(self.states) if "encoder_outputs" in forward_parameters(model) else None
        assert self.given is not None
        with torch.no_grad():
            given = self._of_rows(self.given).to(model.device)
            size = model.config.get_text_config(decoder=True).vocab_size
            given = given.to(model.dtype) if given.is_floating_point() else given.clamp(max=size - 1)
            states = model.get_encoder()(given, **_known(model, {"attention_mask": self.mask}), return_dict=True)
        return EncoderOutputs(states, self.mask, self.given)

    def together_with(self, cache: Any) -> Any:
        """The decoder's cache combined with the cross-attention cache, as the model expects it."""
        return None if cache is None else EncoderDecoderCache(cache, self.keys)


def declined(model: PreTrainedModel) -> dict[str, bool]:
    """Arguments that turn off extra outputs which the model's config turns on for every pass.

    An example are router logits of experts, whose loss does not accept our masks.
    """
    asked = [name for name in EXTRAS if any(getattr(config, name, None) for config in _configs(model))]
    if not asked:
        return {}
    parameters = inspect.signature(model.forward).parameters
    passed_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: False for name in asked if passed_on or name in parameters}


def unfit(model: PreTrainedModel, target: PreTrainedModel) -> str | None:
    """The reason why a draft model cannot read the target's input, or None if it can."""
    if not model.config.is_encoder_decoder:
        borrows = target.config.is_encoder_decoder and "encoder_outputs" in forward_parameters(model)
        ours, theirs = (m.config.get_text_config(decoder=True).hidden_size for m in (model, target))
        return (
            f"the draft model reads encoder states of size {ours}, the target's have size {theirs}"
            if borrows and ours != theirs
            else None
        )
    if not target.config.is_encoder_decoder:
        return "the draft model has an encoder, but the target has none"
    inputs = [(m.main_input_name, getattr(m.config, "num_mel_bins", None)) for m in (model, target)]
    if inputs[0] == inputs[1]:
        return None
    return f"the draft model's encoder reads {inputs[0]} (input, mel bins), the target's {inputs[1]}"


def encoder_outputs_of(
    model: PreTrainedModel, input_ids: Tensor, given: Tensor | None, model_kwargs: dict[str, Any]
) -> tuple[EncoderOutputs | None, dict[str, Any]]:
    """Split a call's arguments into encoder outputs and the arguments of a causal LM.

    Args:
        model: the target.
        input_ids: (B, T) int64, the decoder's prompt.
        given: the encoder's input, if the call has one.
        model_kwargs: the model arguments that `generate()` prepared.

    Returns:
        The encoder outputs, None for a decoder-only model, and the other arguments under a causal LM's names.
    """
    if not model.config.is_encoder_decoder:
        return None, model_kwargs
    own = {name: value for name, value in model_kwargs.items() if name not in ("attention_mask", "inputs_embeds")}
    kwargs = {name.removeprefix(PREFIX): value for name, value in own.items()}
    name, keys = cache_name(kwargs), DynamicCache()
    cache = None if name is None else kwargs[name]
    if name is not None and isinstance(cache, EncoderDecoderCache) and not cache.get_seq_length():
        kwargs[name], keys = cache.self_attention_cache, cache.cross_attention_cache
        kwargs[name]._is_user_defined = getattr(cache, "_is_user_defined", False)  # as generate() marks it
    if given is not None and not given.is_floating_point() and bool((given < 0).any()):
        given = None  # a placeholder of transformers for a missing input
    kwargs.setdefault("attention_mask", torch.ones_like(input_ids))  # an encoder's mask has another width
    return EncoderOutputs(kwargs.pop("encoder_outputs"), model_kwargs.get("attention_mask"), given, keys), kwargs


def stand_in(model: PreTrainedModel, rows: int) -> EncoderOutputs | None:
    """Fixed encoder states (rows, 3, H) for probing a model; None if it has no encoder."""
    if not model.config.is_encoder_decoder:
        return None
    width = getattr(model.get_encoder(), "config", model.config).hidden_size
    states = torch.randn(1, 3, width, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    states = states.to(model.device, model.dtype).expand(rows, -1, -1)
    return EncoderOutputs(_Output(last_hidden_state=states))


@dataclass
class _Output(BaseModelOutput):
    """`BaseModelOutput` with the extra outputs of some encoders (NLLB's and Switch's experts, Moonshine)."""

    attention_mask: Tensor | None = None
    router_logits: Any = None
    router_probs: Any = None


def _configs(model: PreTrainedModel) -> tuple[Any, Any]:
    return model.config, model.config.get_text_config(decoder=True)


def _known(model: PreTrainedModel, arguments: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(model.get_encoder().forward).parameters
    return {name: value for name, value in arguments.items() if name in parameters and value is not None}
