"""Differences between releases of transformers, and the internals of transformers that specdec relies on.

This is the only module that depends on a release: a rename in transformers is handled here. Other modules use its names
(`CACHE`, `cache_argument`, `fill_attention_layer`, ...). Checked against transformers 5.17 to 5.24.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList, cache_utils
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)
from transformers.generation import GenerateDecoderOnlyOutput, utils
from transformers.generation.utils import GenerationMixin

# The name of the cache (generation/utils.py, modeling_*.py). 5.24 renamed `past_key_values`, and `cache_params` of
# models without attention, to `cache`. The old names still work for callers there, with a FutureWarning.

RENAMED = "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__  # 5.24
CACHE = "cache" if RENAMED else "past_key_values"  # argument of `generate()` and field of its outputs
CACHE_NAMES = ("cache", "past_key_values", "cache_params")  # arguments of `generate()` in any release
# Arguments of forward passes. Before 5.24 the `cache` of XLM and Flaubert is not a `Cache`.
_FORWARD_NAMES = CACHE_NAMES if RENAMED else CACHE_NAMES[1:]
ASSISTED_STATIC = RENAMED  # 5.24 also gave assisted generation static caches, whose passes are compiled on GPUs
CACHE_LENGTHS = ("cache_length", "past_key_values_length")  # argument of embeddings that count positions


def captures_outputs(hook: Any) -> bool:
    """Return whether a forward hook is transformers' own, which keeps outputs that were asked for.

    A model has such hooks on its attention and its layers from the first call with `output_attentions` or
    `output_hidden_states` on.
    """
    return getattr(hook, "__module__", "") == "transformers.utils.output_capturing"


def prepare_to_capture(model: PreTrainedModel) -> None:
    """Register transformers' hooks for hidden states. A view would register its own on layers that it shares."""
    from transformers.utils import output_capturing

    install = output_capturing.maybe_install_capturing_hooks
    for module in model.modules():
        function: Any = type(module).forward
        while function is not None and install.__name__ not in _names_in(function):
            function = getattr(function, "__wrapped__", None)
        if function is not None:
            install(module)


def _names_in(function: Any) -> tuple[str, ...]:
    return function.__code__.co_names if hasattr(function, "__code__") else ()


def cache_argument(model: nn.Module) -> str | None:
    """Name under which `model.forward` takes and returns its cache; None if it takes none."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in _FORWARD_NAMES if name in parameters), None)


def cache_name(arguments: Mapping[str, Any]) -> str | None:
    """Name under which arguments or a model output hold a cache; None if they hold none."""
    return next((name for name in CACHE_NAMES if name in arguments), None)


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """The cache among arguments or in a model output, or None."""
    name = cache_name(arguments)
    return None if name is None else arguments[name]


def with_current_cache_name(model: nn.Module, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of a `generate()` call with the cache under this release's name.

    Raises:
        TypeError: more than one name is given.
    """
    names = [name for name in CACHE_NAMES if arguments.get(name) is not None]
    if len(names) > 1:
        raise TypeError(f"{' and '.join(names)} are names of the same argument: give one of them")
    others = {name: value for name, value in arguments.items() if name not in CACHE_NAMES}
    if not names:
        return others
    mamba = not RENAMED and "mamba" in type(model).__name__.lower()  # how generate() itself chooses
    return {**others, "cache_params" if mamba else CACHE: arguments[names[0]]}


# Cache layers (cache_utils.py)

# Layers that keep nothing; 5.17 has none.
EMPTY_LAYERS = tuple(getattr(cache_utils, name) for name in ("DummyLayer",) if hasattr(cache_utils, name))
# Layers of a DynamicCache that a call can continue from.
CONTINUABLE_LAYERS = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    *EMPTY_LAYERS,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    *([cache_utils.DynamicIndexedLayer] if hasattr(cache_utils, "DynamicIndexedLayer") else []),
)


def fill_attention_layer(layer: Any, keys: Tensor | None, values: Tensor | None, columns: int) -> None:
    """Replace the keys and values (B, heads, columns, dim) of a DynamicCache's layer; None empties it."""
    if isinstance(layer, EMPTY_LAYERS):
        return
    if keys is not None:
        layer.lazy_initialization(keys, values)
    layer.keys, layer.values, layer.is_initialized = keys, values, keys is not None
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = columns


def fill_recurrent_layer(layer: Any, state: int, window: Tensor | None, memory: Tensor | None) -> None:
    """Replace a recurrent state of a DynamicCache's layer: the convolution window and the recurrent memory."""
    layer.has_previous_state[state] = True
    if window is not None:
        layer.lazy_initialization(conv_states=window, state_idx=state)
        layer.conv_states[state].copy_(window)
    if memory is not None:
        layer.lazy_initialization(recurrent_states=memory, state_idx=state)
        layer.recurrent_states[state].copy_(memory)


# `generate()` around a custom_generate callable (generation/utils.py)

NOT_HANDED_OVER = ("streamer", "synced_gpus", "assistant_model")  # arguments that generate() keeps from the callable
# Model arguments of images, videos and audio that are dropped after the first pass. Older releases have no such list.
PREFILL_ONLY = frozenset(getattr(utils, "MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL", ()))
# Arguments of generate() about fetching a custom_generate repository rather than about generating.
REPOSITORY_ARGUMENTS = frozenset(
    "revision token cache_dir force_download local_files_only proxies repo_type subfolder user_agent".split()
)


def generate_frame() -> dict[str, Any]:
    """Local variables of the `generate()` call that runs this code; they hold the `NOT_HANDED_OVER` arguments.

    generate() drops these even for a callable that names them. A streamer would then wait for its end forever.
    """
    frame: FrameType | None = sys._getframe(2)
    wanted = inspect.unwrap(GenerationMixin.generate).__code__
    while frame is not None and frame.f_code is not wanted:
        frame = frame.f_back
    return frame.f_locals if frame is not None else {}


def requested(name: str, model: PreTrainedModel, config: GenerationConfig | None, arguments: Mapping[str, Any]) -> Any:
    """Resolve a setting of a call as generate() does: from the arguments (even if None), the config, or the model."""
    if name in arguments:
        return arguments[name]
    value = getattr(config, name, None)
    return getattr(model.generation_config, name, None) if value is None else value


def is_synced(model: PreTrainedModel, synced_gpus: bool | None) -> bool:
    """Return whether processes run their passes together; `synced_gpus` of None is resolved as in `generate()`."""
    if synced_gpus is None:
        return utils.is_deepspeed_zero3_enabled() or utils.is_fsdp_managed_module(model)
    return synced_gpus


def run_decoding_loop(
    model: PreTrainedModel,
    input_ids: Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    streamer: Any,
    **model_kwargs: Any,
) -> Any:
    """Run transformers' own decoding loop with arguments that generate() has prepared.

    Raises:
        ValueError: the mode is one that generate() handles before it calls a custom_generate callable.
    """
    mode = config.get_generation_mode()
    if streamer is not None:  # generate() saw a custom_generate callable, which hides the mode from its own check
        model._validate_generation_mode(mode, config, {"streamer": streamer})
    if mode.value not in ("sample", "greedy_search", "assisted_generation", "beam_search", "beam_sample"):
        raise ValueError(f"{mode.value} is handled before a custom_generate callable: call generate() without one")
    method = "_beam_search" if mode.value.startswith("beam") else "_sample"
    if method == "_sample":
        model_kwargs["streamer"] = streamer
    return getattr(type(model), method)(
        model,
        input_ids,
        logits_processor=processors,
        stopping_criteria=criteria,
        generation_config=config,
        **model_kwargs,
    )


def mask_width(config: GenerationConfig) -> int:
    """Columns of a call's attention mask of ones, which generate() does not pass to the callable; 0 if unknown."""
    return getattr(config, "_mask_length", 0)


def pad_token(config: GenerationConfig) -> int | None:
    """Padding token that generate() has resolved for a call."""
    token = config._pad_token_tensor
    return None if token is None else int(token)


def is_pipeline_parallel(model: PreTrainedModel) -> bool:
    """Return whether the model's layers are split into stages that run in several processes."""
    return getattr(model, "_pp_stage", None) is not None


def tensor_parallel_mesh(model: PreTrainedModel) -> Any:
    """Device mesh of the processes that each hold a part of every layer; None if this process holds whole layers.

    A model loaded with a `tp_size` has `_tp_size` and `_device_mesh`, of one dimension or with a dimension named "tp".
    """
    mesh, size = getattr(model, "_device_mesh", None), getattr(model, "_tp_size", None)
    if mesh is None or (size or 1) == 1:
        return None
    return mesh if mesh.ndim == 1 else mesh["tp"]
