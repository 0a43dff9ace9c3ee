"""Checks whether a `generate()` call can be speculated on. A call that cannot runs as plain `generate()`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from specdec.engine.hf import length_limits, multimodal, prompt_layout
from specdec.engine.hf.call import Call
from specdec.engine.hf.grammars import is_grammar
from specdec.engine.hf.preparation import prepares_otherwise
from specdec.engine.settings import Settings
from specdec.models.attention_masks import spans
from specdec.models.cache.buffers import Span
from specdec.models.capability import Capability, has_usual_hidden_states
from specdec.models.compat import CACHE, CACHE_NAMES, cache_in, is_pipeline_parallel, requested
from specdec.models.exact.exactness import Exactness, exactness
from specdec.models.exact.row_kernels import has_row_kernels, on_device
from specdec.models.exact.row_linear import ROWS
from specdec.models.exact.single_steps import has_recurrent_layers
from specdec.models.introspection import device_of
from specdec.models.positions import counts_positions, padding_counted_by
from specdec.models.recurrent_layers import has_states
from specdec.sampling.logits_processors import NodeProcessors

# Keyword arguments of the hook that the loop supports. Any other with a value reaches the model's forward pass, where
# its effect on draft trees is unknown: such calls run as plain decoding.
KNOWN_KWARGS = {
    "attention_mask",
    "position_ids",
    *CACHE_NAMES,
    "logits_to_keep",
    "use_cache",
    "inputs_embeds",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "return_dict",
    "cache_position",
}
# Fields of a GenerationConfig for transformers' own assisted generation, which have no effect here.
ASSISTED_FIELDS = ("assistant_ensemble_weight", "use_mtp")

SETTINGS = {"proposer", "compile", *Settings.__annotations__}  # not of a call


class Unsupported(ValueError):
    """Error for a `generate()` call that cannot be speculated on, such as beam search.

    Raised only by a `SpeculativeGenerator` with `on_unsupported="error"`, with the reason as its message. By default
    such a call runs as plain `generate()`, with a warning and an entry in `Report.plain_reasons`.

    Example:
        ```python
        spec = SpeculativeGenerator(model, "ngram", on_unsupported="error")
        try:
            output = spec.generate(**inputs, num_beams=4)
        except Unsupported as error:
            print(error)  # cannot speculate: beam search keeps several hypotheses ...
        ```
    """


def check_arguments(inputs: Any, kwargs: dict[str, Any]) -> None:
    """Check arguments that no `generate()` accepts.

    Raises:
        TypeError: an argument of `SpeculativeGenerator`, or inputs that are not a tensor.
        ValueError: a prompt without a batch dimension.
    """
    misplaced = SETTINGS & kwargs.keys()
    if misplaced and "custom_generate" not in kwargs:  # it may have arguments of these names
        name = min(misplaced)
        once = f", or for single calls to spec.options({name}=...)" if name in Settings.__annotations__ else ""
        raise TypeError(f"{name} is an argument of SpeculativeGenerator(...), not of generate(): pass it there{once}")
    if inputs is not None and not isinstance(inputs, Tensor):
        raise TypeError(
            f"generate() takes a tensor of token ids, got a {type(inputs).__name__}: "
            'generate(**tokenizer(text, return_tensors="pt"))'
        )
    ids = kwargs.get("input_ids", inputs)
    if isinstance(ids, Tensor) and ids.dim() == 1 and not ids.is_floating_point():
        raise ValueError(f"generate() takes prompts of shape (B, T), got one of shape ({len(ids)},): pass ids[None]")


def decided_before(model: PreTrainedModel, config: GenerationConfig | None, kwargs: dict[str, Any]) -> str | None:
    """Return the reason why transformers would not reach a custom_generate callable for this call, or None."""
    if kwargs.get("custom_generate") is not None:
        return "custom_generate has its own decoding loop"
    for name in ("token_healing", "penalty_alpha", "dola_layers", "constraints", "force_words_ids", "num_beam_groups"):
        value = requested(name, model, config, kwargs)
        if value not in (None, False, 0) and not (name == "num_beam_groups" and value == 1):
            return f"{name} is handled by transformers before any decoding loop"
    if kwargs.get("cache_implementation") == "paged":
        return "cache_implementation='paged' is continuous batching"
    return None


def exactness_of(model: PreTrainedModel, able: Capability, call: Call) -> tuple[Exactness, str | None]:
    """Return the result of the probe for a call with `exact=True`, and why it runs plain; None if it does not."""
    reason = _inexact_prompt(model, able, call)
    if reason is not None:
        return Exactness(), reason
    padded = not bool(prompt_layout.real_columns(call.input_ids, call.config, call.text_kwargs).all())
    found = exactness(model, able, len(call.input_ids), padded)
    return found, found.problem


def _inexact_prompt(model: PreTrainedModel, able: Capability, call: Call) -> str | None:
    """Return why plain decoding reads a call's prompt in ways that `exact=True` does not reproduce; None if it does."""
    real, cache = prompt_layout.real_columns(call.input_ids, call.config, call.text_kwargs), cache_in(call.text_kwargs)
    cached, windows = prompt_layout.columns_in(cache), set(spans(model, able.masks or "own")) != {Span()}
    if torch.is_autocast_enabled(device_of(model).type):
        return "exact=True is not supported within torch.autocast"
    if call.config.prefill_chunk_size is not None:
        return "exact=True is not supported with prefill_chunk_size"
    if call.config.cache_implementation not in (None, "dynamic"):
        return f"exact=True is not supported with cache_implementation={call.config.cache_implementation!r}"
    if not bool(real.all()) and (cached or multimodal.shown(call.text_kwargs) or not prompt_layout.left_padded(real)):
        return "exact=True: prompts with padding must be read at once, with the padding on the left"
    if cached and real.shape[1] - cached < 2:
        return "exact=True needs at least two new tokens after those of a cache"
    if len(real) > ROWS and (on_device(model) or has_row_kernels(model)):
        return f"exact=True is not supported for more than {ROWS} rows on a device or within exact()"
    if cached and on_device(model):
        return "exact=True is not supported on a device after a cache of earlier turns"
    if has_recurrent_layers(model) and cached:
        return "exact=True is not supported for recurrent layers after a cache of earlier turns"
    if windows and (cached or getattr(cache, "_is_user_defined", False)):
        return "exact=True is not supported for sliding windows with a cache of the caller"
    return None


def why_plain(model: PreTrainedModel, capability: Capability, call: Call, uses_target_choices: bool) -> str | None:
    """Return the reason why a call must run as plain decoding, or None.

    Args:
        model: the target.
        capability: how the target can be run.
        call: the prepared call.
        uses_target_choices: True if processors run on reached nodes only (`verifier.SequentialVerifier`).

    Raises:
        ValueError: an empty batch or prompt.
    """
    input_ids, processors, config, model_kwargs = call.input_ids, call.processors, call.config, call.text_kwargs
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.SAMPLE, GenerationMode.GREEDY_SEARCH, GenerationMode.ASSISTED_GENERATION):
        return f"{mode.value.replace('_', ' ')} keeps several hypotheses or its own state"
    if capability.masks is None:
        return capability.message(type(model).__name__)
    if getattr(model.prepare_inputs_for_generation, "__func__", None) is not type(model).prepare_inputs_for_generation:
        return "something replaced the model's prepare_inputs_for_generation, as PEFT's prompt tuning does"
    if prepares_otherwise(model):
        return f"{type(model).__name__} prepares the inputs of its passes itself (prepare_inputs_for_generation)"
    if not config.use_cache:
        return "use_cache=False (some configs set it; pass use_cache=True to generate())"
    if is_pipeline_parallel(model):
        return "the model's layers are distributed over several processes (pipeline parallelism)"
    if config.output_attentions:
        return "output_attentions: attention weights of a draft pass are not those of single tokens"
    if config.output_hidden_states and not has_usual_hidden_states(model):
        return "output_hidden_states: the states of this model have more dimensions than rows, tokens and features"
    if (config.cache_implementation or "").startswith(("quantized", "offloaded")):
        return f"cache_implementation={config.cache_implementation!r} stores keys and values in its own format"
    media = multimodal.shown(model_kwargs)
    known = KNOWN_KWARGS | media
    strange = [key for key, value in model_kwargs.items() if key not in known and not _empty(key, value)]
    if strange:
        return f"the model argument {strange[0]} is not supported for drafted tokens"
    if input_ids.dim() != 2:
        return f"input_ids has {input_ids.dim()} dimensions, expected 2"
    windows, states = set(spans(model, capability.masks)) != {Span()}, has_states(model)
    reason = (
        _padding_problem(input_ids, config, model_kwargs, bool(media))
        or (multimodal.problem(model, input_ids, config, model_kwargs) if media else None)
        or prompt_layout.problem(input_ids, config, model_kwargs, windows, states)
        or _counting_problem(model, input_ids, config, model_kwargs)
        or length_limits.rope_problem(model, input_ids, config, model_kwargs)
        or length_limits.scale_problem(model, input_ids, config, model_kwargs)
    )
    if reason:
        return reason
    if not capability.trees and len(input_ids) > 1:
        return capability.message(f"{type(model).__name__} in a batch")
    unknown = NodeProcessors(processor for processor in processors if not is_grammar(processor)).unknown
    if unknown and not (uses_target_choices and len(input_ids) == 1):
        why, remedy = (
            ("in a batch, whose rows grow at different speeds", "pass one prompt per call")
            if uses_target_choices
            else ("under a rule that needs the scores of all nodes", 'use rule="coupled"')
        )
        return (
            f"{unknown[0]} may follow the text with a state of its own, as a grammar's does, so it cannot be called on "
            f"drafts {why}: {remedy}, make it a specdec.GrammarProcessor if it is a grammar, or set its attribute "
            "`stateless` to True if its scores of a row depend on that row's text and scores only"
        )
    return None


def ignored_fields(config: GenerationConfig) -> list[str]:
    """Names of fields that are set but have no effect on speculative decoding."""
    return [name for name in ASSISTED_FIELDS if getattr(config, name, None)]


def _padding_problem(
    input_ids: Tensor, config: GenerationConfig, model_kwargs: dict[str, Any], with_images: bool
) -> str | None:
    """Return what is unsupported about the mask or the positions, or None.

    Raises:
        ValueError: an empty batch or prompt.
    """
    embeds, mask = model_kwargs.get("inputs_embeds"), model_kwargs.get("attention_mask")
    width = input_ids.shape[1] if embeds is None else embeds.shape[1]
    if len(input_ids) == 0:
        raise ValueError("the batch is empty: pass at least one prompt")
    if width == 0:
        raise ValueError("the prompt is empty: pass at least one token, the tokenizer's bos_token for example")
    if mask is not None and (mask.dim() != 2 or len(mask) != len(input_ids) or mask.shape[1] < width):
        return f"attention_mask has shape {tuple(mask.shape)}, the prompt {(len(input_ids), width)}"
    if embeds is None and not prompt_layout.columns_in(cache_in(model_kwargs)):
        for name in (
            "attention_mask",
            "position_ids",
        ):  # transformers derives the second from the first, and drops masks of ones
            given = model_kwargs.get(name)
            if given is not None and given.shape[-1] != width:
                return f"attention_mask or position_ids have {given.shape[-1]} columns, the prompt {width}"
    real = prompt_layout.real_columns(input_ids, config, model_kwargs)
    if not bool(real.any(1).all()):
        return f"row {int((~real.any(1)).nonzero()[0])} of the batch is all padding"
    if not bool(real[:, -1].all()):
        return (
            f"row {int((~real[:, -1]).nonzero()[0])} of the batch ends in padding: set tokenizer.padding_side = 'left' "
            "for generation, and pass attention_mask where a prompt's own last token is the padding token"
        )
    positions = model_kwargs.get("position_ids")
    if positions is not None and not (with_images and positions.dim() == 3):  # the model's own, see `multimodal`
        expected, positions = real.long().cumsum(-1) - 1, positions.cpu()
        ordered = positions.shape[-2:] == expected.shape  # (B, T), or (planes, B, T) of multimodal models
        if not ordered or not bool(((positions == expected) | ~real).all()):
            if positions.dim() == 3 and cache_in(model_kwargs) is not None:
                return (
                    "an image of an earlier turn shifts the positions after it: pass the whole conversation with "
                    f"its images, without {CACHE}"
                )
            return "position_ids do not count the prompt's tokens from 0"
    return None


def _counting_problem(
    model: PreTrainedModel, input_ids: Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]
) -> str | None:
    """Return what is unsupported for models that derive positions themselves, from columns or token ids, or None."""
    if counts_positions(model) and not prompt_layout.left_padded(
        prompt_layout.real_columns(input_ids, config, model_kwargs)
    ):
        return "attention_mask has holes inside a prompt, which this model counts as positions"
    if any(bool((input_ids == padding).any()) for padding in padding_counted_by(model)):
        return "the decoder's prompt contains padding, from which this model derives the positions of a prompt"
    if config.prefill_chunk_size is not None and model.config.is_encoder_decoder:
        return "prefill_chunk_size for an encoder-decoder model"
    return None


def _empty(name: str, value: Any) -> bool:
    """Return True for an argument without data, as multimodal models get with a text-only prompt."""
    if name == "mm_token_type_ids" and isinstance(value, Tensor):
        return not bool(value.any())  # 0 marks text tokens
    return value is None or (isinstance(value, dict) and not value)
