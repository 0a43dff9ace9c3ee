"""transformers' `generate()` around us: its arguments, its warnings, and standing in for a model's method."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList
from transformers.generation import StopStringCriteria
from transformers.generation.utils import GenerateOutput, GenerationMixin

from specdec.call import Call
from specdec.compat import requested, run_decoding_loop


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
    """What `generate()` would have called without us, with the arguments it prepared."""
    kwargs = dict(call.model_kwargs)
    if synced_gpus:
        kwargs["synced_gpus"] = True
    return run_decoding_loop(
        model, call.input_ids, call.processors, call.criteria, call.config, call.streamer, **kwargs
    )


def with_stop_strings(
    model: PreTrainedModel, config: GenerationConfig | None, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Turn `stop_strings` into a criterion: transformers hands no tokenizer to a custom_generate callable."""
    given = requested("stop_strings", model, config, kwargs)
    if given is None:
        return kwargs
    tokenizer = kwargs.get("tokenizer")
    if tokenizer is None:
        raise ValueError(f"stop_strings={given!r} needs the tokenizer: pass tokenizer=... to generate()")
    made, theirs = StopStringCriteria(stop_strings=given, tokenizer=tokenizer), kwargs.get("stopping_criteria")
    criteria = StoppingCriteriaList([] if theirs is None else theirs)
    if not any(type(criterion) is StopStringCriteria for criterion in criteria):  # the caller's takes precedence
        criteria.append(made)
    return {**kwargs, "stop_strings": None, "stopping_criteria": criteria}


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
