"""Questions about a transformers model that its class and config answer, without running it.

The model inside PEFT's adapters or `torch.compile`, its device, its layers and how they attend, the parameters of its
forward pass, its end tokens and the marks of its images.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from specdec.models import compat

LEVELS = ("_orig_mod", "base_model", "model")  # torch.compile's, PEFT's (0.21) and its tuners' way to what they wrap


def unwrap_model(model: Any) -> PreTrainedModel:
    """The transformers model that `model` is, or wraps; raises TypeError where there is none."""
    inner = model
    while not isinstance(inner, PreTrainedModel):
        inner = next((getattr(inner, level) for level in LEVELS if _holds(inner, level)), None)
        if inner is None:
            parallel = isinstance(getattr(model, "module", None), PreTrainedModel)  # DistributedDataParallel, FSDP1
            raise TypeError(
                "model must be a transformers PreTrainedModel, or one in PEFT's adapters or torch.compile, got "
                f"{type(model).__name__}" + ("; give its .module" if parallel else "")
            )
    return inner


def require_lm_head(model: PreTrainedModel) -> None:
    """Raises for a model that gives hidden states alone, as `AutoModel` loads them."""
    if not model.can_generate():
        raise ValueError(
            f"{type(model).__name__} has no LM head, so it gives no logits: load the model with AutoModelForCausalLM"
        )


def generate_owner(model: Any) -> Any:
    """Whose `generate()` to call: the outermost wrapper that has one of its own, else the model inside."""
    outer = getattr(model, "_orig_mod", model)  # torch.compile's only passes on
    return outer if hasattr(type(outer), "generate") else unwrap_model(model)


def _holds(model: Any, level: str) -> bool:
    return level in getattr(model, "_modules", {})


MARKS = tuple(f"{kind}_token_{end}" for kind in ("image", "video", "audio") for end in ("id", "index"))  # in configs


def marks_of(config: PretrainedConfig) -> list[int]:
    """Tokens that stand in a text in the place of pictures, films and sounds; none for a model of texts alone."""
    return [mark for name in MARKS if (mark := getattr(config, name, None)) is not None]


def end_tokens(model: PreTrainedModel) -> set[int]:
    """What ends a model's texts, by its generation config."""
    return set(end_tokens_in(model.generation_config))


def end_tokens_in(config: GenerationConfig | None) -> list[int]:
    """What ends texts by a generation config."""
    ends = config.eos_token_id if config is not None else None
    return [ends] if isinstance(ends, int) else list(ends or ())


PREFIX = "decoder_"  # of what is the decoder's
OWN = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "hidden_states")


def forward_parameters(model: PreTrainedModel) -> set[str]:
    """Names that `model.forward` accepts."""
    return set(inspect.signature(model.forward).parameters)


def decoders_name(model: PreTrainedModel, name: str) -> str:
    """What a model calls a part of a decoder's pass."""
    return PREFIX + name if model.config.is_encoder_decoder and name in OWN else name


def takes_positions(model: PreTrainedModel) -> bool:
    """A pass can be told where its tokens stand."""
    return decoders_name(model, "position_ids") in forward_parameters(model)


def decoder_layers(model: PreTrainedModel) -> Sequence[nn.Module]:
    """The decoder's layers in order, found by `get_decoder()` and the config's number of layers."""
    decoder = model.get_decoder()
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = [child for child in decoder.children() if isinstance(child, nn.ModuleList) and len(child) == count]
    if len(lists) != 1:
        raise ValueError(f"cannot tell which modules of {type(decoder).__name__} are its {count} layers")
    return list(lists[0])


def is_sharded(model: nn.Module) -> bool:
    """Do parts of its weights lie with other processes?

    torch's DTensors (tensor parallelism, FSDP2), or DeepSpeed's mark on what ZeRO-3 has split (0.19). What FSDP2 has
    gathered for a pass is a plain tensor until it lets go of it: then its modules tell.
    """
    split = any(hasattr(weight, "full_tensor") or hasattr(weight, "ds_id") for weight in model.parameters())
    return split or any(hasattr(module, "set_reshard_after_forward") for module in model.modules())


FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
INDEXED = "indexed_attention"  # of the tokens that an indexer picks, for which it wants a mask in every pass
RECURRENT = ("linear_attention", "conv")  # layers that take a mask of padding alone, which they need not have here
MIXED = {"hybrid": FULL, "hybrid_sliding": SLIDING}  # layers that have both, and how they attend


def device_of(model: PreTrainedModel) -> torch.device:
    """Where a model takes its inputs. One whose first weights accelerate keeps elsewhere calls itself "meta"."""
    if model.device.type != "meta":
        return model.device
    device = getattr(getattr(model.get_input_embeddings(), "_hf_hook", None), "execution_device", None)
    return model.device if device is None else torch.device(device)


def cache_argument(model: PreTrainedModel) -> str:
    """Under which name `model.forward` takes a cache, and gives it back; models without attention have their own."""
    return compat.cache_argument(model) or compat.CACHE


def layer_kinds(config: Any) -> list[str]:
    """How each layer sees the tokens before it; empty for a model that says nothing of it."""
    return [MIXED.get(kind, kind) for kind in getattr(config, "layer_types", None) or ()]
