"""Integration with transformers' `generate()`: its arguments, plain decoding, and replacing a model's method."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from threading import Lock
from types import MethodType
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, StopStringCriteria
from transformers.generation.utils import GenerateOutput, GenerationMixin

from specdec.engine.hf.call import Call
from specdec.models.compat import pad_token, requested, run_decoding_loop


class Installed:
    """Replacement of a model's `generate` by those of generators, as a bound method with the original signature.

    Generators can be installed and removed in any order and from any thread; the newest one is called. A deep copy of
    the model uses its own `generate`.

    Args:
        model: the model, which is only referenced weakly.
    """

    def __init__(self, model: Any):
        self.before = vars(model).get("generate")  # an instance attribute that shadows the method
        self.answering: tuple[list[Callable[..., Any]], ...] = ()  # each in a list, which gives it an identity
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
        """Return the replacement installed at a model; None if its `generate` is the class's or third-party."""
        function = getattr(vars(model).get("generate"), "__func__", None)
        found = getattr(function, KEPT_AT, None)  # `functools.wraps` copies attributes to other functions
        return found if found is not None and found.function is function and found._model() is model else None


KEPT_AT = "_specdec_installed"
_lock = Lock()  # held while replacements change


def install(model: Any, generate: Callable[..., Any]) -> Callable[[], None]:
    """Replace a model's `generate`.

    Returns:
        A function that removes the replacement. Removing the last one restores the model's original `generate`, unless
        other code has replaced it since.
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
    """Run transformers' own decoding loop on a prepared call."""
    kwargs = dict(call.model_kwargs)
    if synced_gpus:
        kwargs["synced_gpus"] = True
    return run_decoding_loop(
        model, call.input_ids, call.processors, call.criteria, call.config, call.streamer, **kwargs
    )


def count_tokens(sequences: Tensor, call: Call) -> int:
    """Count the new tokens of a call's sequences (B, T), without the padding after the end of a row.

    A row ends at its end token, or before the padding where another criterion ended it. If padding is an end token,
    the first one counts.
    """
    new = sequences[:, call.input_ids.shape[1] :]
    if len(new) == 1 or not any(hasattr(criterion, "eos_token_id") for criterion in call.criteria):
        return new.numel()  # nothing is padded
    ends = [c.eos_token_id.flatten() for c in call.criteria if isinstance(c, EosTokenCriteria)]
    end_tokens, padding = torch.cat([new.new_empty(0), *ends]).to(new.device), pad_token(call.config)
    ended = torch.isin(new, end_tokens).int()
    real = ended.cumsum(1) - ended == 0
    if padding is not None and padding not in end_tokens.tolist():
        real &= new.ne(padding).int().flip(1).cummax(1).values.flip(1).bool()
    return int(real.sum())


def with_stop_strings(
    model: PreTrainedModel, config: GenerationConfig | None, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Turn `stop_strings` into a criterion, since transformers passes no tokenizer to a custom_generate callable.

    Raises:
        ValueError: no tokenizer was given.
    """
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
    """Map positional arguments of `generate()` after `inputs` and `generation_config` to their names.

    Raises:
        TypeError: too many arguments.
    """
    names = list(inspect.signature(GenerationMixin.generate).parameters)[3:]  # after self and those two
    if len(values) > names.index("kwargs"):
        raise TypeError(
            f"generate() takes at most {2 + names.index('kwargs')} positional arguments, got {2 + len(values)}"
        )
    return dict(zip(names, values, strict=False))


def callers_level() -> int:
    """Return the `stacklevel` of the innermost frame outside of specdec, transformers and torch."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ("specdec", "transformers", "torch", "contextlib"):
            return level
        frame, level = frame.f_back, level + 1
    return level
