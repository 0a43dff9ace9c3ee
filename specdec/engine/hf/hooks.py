"""transformers' `generate()` around us: its arguments, its warnings, and standing in for a model's method."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from threading import Lock
from types import MethodType
from typing import Any
from weakref import ref

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList
from transformers.generation import StopStringCriteria
from transformers.generation.utils import GenerateOutput, GenerationMixin

from specdec.engine.hf.call import Call
from specdec.models.compat import requested, run_decoding_loop


class Installed:
    """A model's `generate` while generators stand in for it: a bound method with the signature of the one before.

    Generators of several contexts and threads are installed and removed in any order; the newest answers. A deep copy
    of the model generates by itself.
    """

    def __init__(self, model: Any):
        self.before = vars(model).get("generate")  # an attribute of the model's own, which hides its class's method
        self.answering: tuple[list[Callable[..., Any]], ...] = ()  # each in a list, and so an object of its own
        self._model = ref(model)

        @wraps(getattr(self.before, "__func__", type(model).generate))
        def generate(model: Any, /, *args: Any, **kwargs: Any) -> Any:
            answering, is_ours = self.answering, model is self._model()
            if is_ours and answering:
                return answering[-1][0](*args, **kwargs)
            if is_ours and self.before is not None:
                return self.before(*args, **kwargs)
            return type(model).generate(model, *args, **kwargs)

        self.function = generate
        vars(generate)[KEPT_AT] = self

    @classmethod
    def at(cls, model: Any) -> Installed | None:
        """What stands at a model, unless that is its class's method or somebody else's."""
        function = getattr(vars(model).get("generate"), "__func__", None)
        found = getattr(function, KEPT_AT, None)  # `functools.wraps` copies attributes to functions of others
        return found if found is not None and found.function is function and found._model() is model else None


KEPT_AT = "_specdec_installed"
_lock = Lock()  # of changes to what stands at models


def install(model: Any, generate: Callable[..., Any]) -> Callable[[], None]:
    """Make `generate` stand in for a model's method of this name, until what is returned is called.

    When the last one is removed, the model has again what it had before, unless somebody has replaced it since.
    """
    entry = [generate]
    with _lock:
        installed = Installed.at(model)
        if installed is None:
            installed = Installed(model)
            vars(model)["generate"] = MethodType(installed.function, model)
        installed.answering += (entry,)

    def remove() -> None:
        with _lock:
            installed.answering = tuple(kept for kept in installed.answering if kept is not entry)
            if not installed.answering and Installed.at(model) is installed:
                del vars(model)["generate"]
                if installed.before is not None:
                    vars(model)["generate"] = installed.before

    return remove


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
