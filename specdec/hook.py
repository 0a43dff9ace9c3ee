"""transformers' `generate()` around us: what it drops on the way to a custom_generate callable, and what it would run.

The one place that touches its internals; versions read stand beside each touch.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Sequence
from types import FrameType, MethodType
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList
from transformers.generation import StopStringCriteria, utils
from transformers.generation.utils import GenerateOutput, GenerationMixin

from specdec.call import Call

NOT_HANDED_OVER = ("streamer", "synced_gpus", "assistant_model")  # by generate() to a custom_generate callable


def in_common(model: PreTrainedModel, synced_gpus: bool | None) -> bool:
    """What transformers takes a `synced_gpus` of None for; a custom_generate callable is not told (5.17 to 5.23)."""
    if synced_gpus is None:
        return utils.is_deepspeed_zero3_enabled() or utils.is_fsdp_managed_module(model)
    return synced_gpus


class Installed:
    """Stands as a model's `generate`; a deep copy of the model gets back its class's own."""

    def __init__(self, generate: Callable[..., Any], model: Any):
        self._generate, self._model = generate, model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._generate(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self._model), self._model)
        return MethodType(type(copied).generate, copied)


def plain(model: PreTrainedModel, call: Call, synced_gpus: bool) -> GenerateOutput | Tensor:
    """What `generate()` would have called without us, with the arguments it prepared (transformers 5.17 to 5.23)."""
    config, streamer, kwargs = call.config, call.streamer, dict(call.model_kwargs)
    if synced_gpus:
        kwargs["synced_gpus"] = True
    mode = config.get_generation_mode()
    if streamer is not None:  # generate() saw our callable, which hides the mode from its own check
        model._validate_generation_mode(mode, config, {"streamer": streamer})
    if mode.value not in ("sample", "greedy_search", "assisted_generation", "beam_search", "beam_sample"):
        raise ValueError(f"{mode.value} is handled before a custom_generate callable: call generate() without one")
    method = "_beam_search" if config.num_beams and config.num_beams > 1 else "_sample"
    if method == "_sample":
        kwargs["streamer"] = streamer
    return getattr(type(model), method)(
        model,
        call.input_ids,
        logits_processor=call.processors,
        stopping_criteria=call.criteria,
        generation_config=config,
        **kwargs,
    )


def with_stop_strings(
    model: PreTrainedModel, config: GenerationConfig | None, kwargs: dict[str, Any]
) -> tuple[GenerationConfig | None, dict[str, Any]]:
    """Turn `stop_strings` into a criterion: transformers hands no tokenizer to a custom_generate callable."""
    given = kwargs.get("stop_strings") or getattr(config, "stop_strings", None)
    given = given or getattr(model.generation_config, "stop_strings", None)
    if not given:
        return config, kwargs
    tokenizer = kwargs.get("tokenizer")
    if tokenizer is None:
        raise ValueError(f"stop_strings={given!r} needs the tokenizer: pass tokenizer=... to generate()")
    if config is not None and config.stop_strings:
        config = copy.deepcopy(config)
        config.stop_strings = None
    criteria = StoppingCriteriaList(kwargs.get("stopping_criteria") or [])
    criteria.append(StopStringCriteria(stop_strings=given, tokenizer=tokenizer))
    return config, {**kwargs, "stop_strings": None, "stopping_criteria": criteria}


def further_arguments(values: Sequence[Any]) -> dict[str, Any]:
    """The positional arguments of `generate()` that follow `inputs` and `generation_config`, by their names."""
    names = list(inspect.signature(GenerationMixin.generate).parameters)[3:]  # behind self and those two
    if len(values) > names.index("kwargs"):
        raise TypeError(
            f"generate() takes at most {2 + names.index('kwargs')} positional arguments, got {2 + len(values)}"
        )
    return dict(zip(names, values, strict=False))


def callers_level() -> int:
    """`stacklevel` that makes a warning point at the first line outside of specdec, transformers and torch."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ("specdec", "transformers", "torch", "contextlib"):
            return level
        frame, level = frame.f_back, level + 1
    return level


def generate_frame() -> dict[str, Any]:
    """The local variables of transformers' `generate()` that is calling us.

    It has what is `NOT_HANDED_OVER`, but (5.17 to 5.23, generation/utils.py) drops it on the way to a
    custom_generate callable, even to one that names it; a streamer would wait for its end forever.
    """
    frame: FrameType | None = sys._getframe(2)
    wanted = inspect.unwrap(GenerationMixin.generate).__code__
    while frame is not None and frame.f_code is not wanted:
        frame = frame.f_back
    return frame.f_locals if frame is not None else {}
