"""Properties of a transformers model that follow from its class and config, without running it.

These are the model inside PEFT adapters or `torch.compile`, its device, layers and attention kinds. Also the parameters
of its forward pass, its end tokens, and its placeholder tokens of images, videos and audio.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from specdec.models import compat

LEVELS = ("_orig_mod", "base_model", "model")  # where torch.compile, PEFT (0.21) and its tuners keep the wrapped model


def unwrap_model(model: Any) -> PreTrainedModel:
    """Return the transformers model that `model` is or wraps; raise TypeError if there is none."""
    inner = model
    while not isinstance(inner, PreTrainedModel):
        inner = next((getattr(inner, level) for level in LEVELS if _holds(inner, level)), None)
        if inner is None:
            parallel = isinstance(getattr(model, "module", None), PreTrainedModel)  # DistributedDataParallel, FSDP1
            raise TypeError(
                "model must be a transformers PreTrainedModel, or one wrapped by PEFT or torch.compile, got "
                f"{type(model).__name__}" + ("; give its .module" if parallel else "")
            )
    return inner


def require_lm_head(model: PreTrainedModel) -> None:
    """Raise ValueError for a model without an LM head, as `AutoModel` loads it."""
    if not model.can_generate():
        raise ValueError(
            f"{type(model).__name__} has no LM head, so it gives no logits: load the model with AutoModelForCausalLM"
        )


def generate_owner(model: Any) -> Any:
    """Return the outermost wrapper that has a `generate()` of its own, else the model inside."""
    outer = getattr(model, "_orig_mod", model)  # torch.compile's wrapper only forwards the call
    return outer if hasattr(type(outer), "generate") else unwrap_model(model)


def _holds(model: Any, level: str) -> bool:
    return level in getattr(model, "_modules", {})


MARKS = tuple(f"{kind}_token_{end}" for kind in ("image", "video", "audio") for end in ("id", "index"))  # in configs


def marks_of(config: PretrainedConfig) -> list[int]:
    """Placeholder tokens of images, videos and audio in a prompt; empty for a text-only model."""
    return [mark for name in MARKS if (mark := getattr(config, name, None)) is not None]


def require_decoder_only(config: PretrainedConfig, name: str) -> None:
    """Raise ValueError for an encoder-decoder model."""
    if config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder model, which is not supported here: use a causal LM")


def end_tokens(model: PreTrainedModel) -> set[int]:
    """End tokens of a model, from its generation config."""
    return set(end_tokens_in(model.generation_config))


def end_tokens_in(config: GenerationConfig | None) -> list[int]:
    """End tokens of a generation config."""
    ends = config.eos_token_id if config is not None else None
    return [ends] if isinstance(ends, int) else list(ends or ())


PREFIX = "decoder_"  # of a decoder's arguments and outputs in an encoder-decoder model
OWN = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "hidden_states")


def forward_parameters(model: PreTrainedModel) -> set[str]:
    """Names that `model.forward` accepts."""
    return set(inspect.signature(model.forward).parameters)


def decoders_name(model: PreTrainedModel, name: str) -> str:
    """Return the model's name for an argument or output of the decoder."""
    return PREFIX + name if model.config.is_encoder_decoder and name in OWN else name


def takes_positions(model: PreTrainedModel) -> bool:
    """True if the forward pass takes position ids."""
    return decoders_name(model, "position_ids") in forward_parameters(model)


def decoder_layers(model: PreTrainedModel) -> Sequence[nn.Module]:
    """Return the decoder's layers in order, found using `get_decoder()` and the config's number of layers.

    Raises:
        ValueError: no list of modules, or more than one, has that length.
    """
    decoder = model.get_decoder()
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = [child for child in decoder.children() if isinstance(child, nn.ModuleList) and len(child) == count]
    if len(lists) != 1:
        raise ValueError(
            f"cannot find the layers of {type(decoder).__name__}: expected exactly one ModuleList of length {count}"
        )
    return list(lists[0])


def is_sharded(model: nn.Module) -> bool:
    """Return whether other processes hold parts of the weights.

    Sharded weights are DTensors (tensor parallelism, FSDP2) or have DeepSpeed's ZeRO-3 attributes (0.19). During a pass
    FSDP2 replaces gathered weights with plain tensors, so its modules are checked as well.
    """
    split = any(hasattr(weight, "full_tensor") or hasattr(weight, "ds_id") for weight in model.parameters())
    return split or any(hasattr(module, "set_reshard_after_forward") for module in model.modules())


FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
INDEXED = "indexed_attention"  # to tokens that an indexer picks; it needs a mask in every pass
RECURRENT = ("linear_attention", "conv")  # layers whose mask only covers padding, which is handled elsewhere here
MIXED = {"hybrid": FULL, "hybrid_sliding": SLIDING}  # layers with recurrence and attention, and their attention kind


def device_of(model: PreTrainedModel) -> torch.device:
    """Device of a model's inputs. A model whose first weights are offloaded by accelerate reports "meta"."""
    if model.device.type != "meta":
        return model.device
    device = getattr(getattr(model.get_input_embeddings(), "_hf_hook", None), "execution_device", None)
    return model.device if device is None else torch.device(device)


def cache_argument(model: PreTrainedModel) -> str:
    """Name under which `model.forward` takes and returns a cache. It differs for models without attention."""
    return compat.cache_argument(model) or compat.CACHE


def layer_kinds(config: Any) -> list[str]:
    """Attention kind of each layer; empty if the config does not state it."""
    return [MIXED.get(kind, kind) for kind in getattr(config, "layer_types", None) or ()]
