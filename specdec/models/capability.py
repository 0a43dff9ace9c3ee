"""`probe`: finds out how a model can be run by `ModelRunner`, by running it.

A tiny ragged batch with a branching draft, a commit that moves nodes and a pass after it, against the model's own
uncached forward pass. Decided once per model and mode, from its output, not from a list of names. Nothing that others
share is touched: what is tried is a view of the model, with its weights and with settings of its own.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PretrainedConfig, PreTrainedModel

from specdec.models import compat
from specdec.models.attention_masks import default_masks
from specdec.models.compat import CONTINUABLE_LAYERS
from specdec.models.introspection import SLIDING, device_of, is_sharded, layer_kinds
from specdec.models.position_limits import positions_of
from specdec.models.probe import last_logits, mismatch, probe_chain, probe_tree, token_ids
from specdec.models.views import apart, in_eval_mode
from specdec.utils.releases import advice

log = logging.getLogger(__name__)

WINDOW = 4  # what sliding windows are set to for the probe, so that short texts reach past them


@dataclass(frozen=True)
class Capability:
    """What a model can be used for.

    Attributes:
        masks: "dict" or "tensor" (how it takes masks: trees and ragged batches), "own" (chains of one row), or None.
        reason: why it is not more, for warnings; empty for full capability.
        installation: the reason lies in the installed transformers, not in the model.
        positions: number of positions at which a pass can place tokens; None: any.
    """

    masks: str | None
    reason: str = ""
    installation: bool = False
    positions: int | None = None

    @property
    def trees(self) -> bool:
        return self.masks in ("dict", "tensor")

    def message(self, subject: str) -> str:
        """The reason, after its subject where that is to blame."""
        return self.reason if self.installation else f"{subject}: {self.reason}"


REMEMBERED = 8  # states of a model: whoever trains switches between two
_found: WeakKeyDictionary[PreTrainedModel, list[tuple[Any, Capability]]] = WeakKeyDictionary()
_known_positions: WeakKeyDictionary[PreTrainedModel, int | None] = WeakKeyDictionary()


def capability(model: PreTrainedModel, drafts: bool = False) -> Capability:
    """`probe(model)`, once, and again when its config, precision, device or mode (train or eval) is another.

    The call's random numbers stay what they are: a model in train mode draws some for its dropout.

    Args:
        drafts: it is a draft model, which runs in eval mode.
    """
    known, state = _found.setdefault(model, []), _state(model, drafts)
    for before, found in known:
        if before == state:
            return found
    log.info("trying out how %s can draft: trees, chains or not at all", type(model).__name__)
    with _same_random_numbers(model):
        found = probe(model, drafts)
        fault = "" if found.trees else installation_fault()
    found = replace(found, reason=fault, installation=True) if fault else found
    known[:] = [(state, found), *known[: REMEMBERED - 1]]
    return found


@functools.cache
def installation_fault() -> str:
    """Why no model can be speculated on with the installed transformers; empty if a tiny Llama made here can.

    Tells a transformers that specdec does not know, which is no fault of a user's model, from a model's own limits.
    """
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "max_position_embeddings": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    try:
        with torch.device("cpu"), torch.random.fork_rng([]):
            found = probe(LlamaForCausalLM(LlamaConfig(**sizes, **heads)).float().eval())
    except Exception as error:  # a release that changed so much that there is nothing to try out
        found = Capability(None, f"{type(error).__name__}: {error}")
    if found.trees:
        return ""
    return (
        f"specdec does not work with the installed transformers, not even for a tiny Llama ({found.reason}). {advice()}"
    )


def _state(model: PreTrainedModel, drafts: bool) -> Any:
    """What a model's passes depend on, other than the values of its weights."""
    training = [] if drafts else [module for module in model.modules() if module.training]
    # Rates of dropout, whether states are computed anew for gradients, ...
    modes = [[value for value in vars(module).values() if isinstance(value, (bool, float))] for module in training]
    return drafts, model.dtype, device_of(model), _said(model.config), modes


def _said(value: Any) -> Any:
    """A config as it is now: values, lists and dictionaries of its own, other objects by what they are."""
    if isinstance(value, PretrainedConfig):
        value = vars(value)
    if isinstance(value, dict):
        return {name: _said(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_said(each) for each in value]
    return value if isinstance(value, (str, int, float, torch.dtype, type(None))) else id(value)


def draft_positions(model: PreTrainedModel) -> int | None:
    """Number of positions of a draft model, found once; None: any, for its drafts at least."""
    if model not in _known_positions:
        with _same_random_numbers(model):
            _known_positions[model] = positions_of(apart(in_eval_mode(model)))
    return _known_positions[model]


def _same_random_numbers(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Within this context passes of the model may draw random numbers; afterwards they go on as if none had been."""
    devices = _devices(model)
    return torch.random.fork_rng(devices, device_type=devices[0].type if devices else "cpu")


@torch.no_grad()
def probe(model: PreTrainedModel, drafts: bool = False) -> Capability:
    """Try the ways to run `model` from the most to the least capable; the first whose logits are right counts.

    drafts: it is a draft model, whose logits may be a little off, by weights in 8 bits say.
    """
    if compat.cache_argument(model) is None:
        return Capability(None, "its forward pass takes no cache")
    if is_sharded(model):  # what gathers its weights cannot be copied, and nobody else can be decoding with it
        with _short_windows(model):
            found = _without_random_numbers(model, _probed(model, model, drafts))
            return replace(found, positions=positions_of(model))
    try:
        view = apart(in_eval_mode(model) if drafts else model)
    except Exception as error:  # somebody's module may hold what cannot be copied: a lock, a file
        return Capability(None, f"its modules cannot be copied to be tried out: {error}")
    with _short_windows(view):
        found = _without_random_numbers(view, _probed(model, view, drafts))
        return replace(found, positions=positions_of(view))


def _without_random_numbers(view: PreTrainedModel, found: Capability) -> Capability:
    """What was found, unless passes draw random numbers: plain decoding, which makes other passes, draws others."""
    if found.masks is None:
        return found
    before = _random_states(view)
    last_logits(view, token_ids(view, 4))
    if all(map(torch.equal, before, _random_states(view))):
        return found
    if any(module.training for module in view.modules()):
        return Capability(None, "it is in train mode, where its forward pass draws random numbers: call model.eval()")
    return Capability(None, "its forward pass draws random numbers")


def _random_states(model: PreTrainedModel) -> list[Tensor]:
    on_devices = [torch.get_device_module(device).get_rng_state(device) for device in _devices(model)]
    return [torch.get_rng_state(), *on_devices]


def _devices(model: PreTrainedModel) -> list[torch.device]:
    """Where a model's weights are that have a generator of random numbers beside the CPU's."""
    return sorted(
        {weight.device for weight in model.parameters() if weight.device.type not in ("cpu", "meta")}, key=str
    )


def _probed(model: PreTrainedModel, view: PreTrainedModel, drafts: bool) -> Capability:
    """What passes of `view`, which is `model` or has its weights, show."""
    reason = ""
    if model.config.get_text_config(decoder=True)._attn_implementation in ("sdpa", "eager"):
        other = {"dict": "tensor", "tensor": "dict"}
        first = default_masks(model)
        kinds = layer_kinds(model.config.get_text_config(decoder=True))
        for masks in (first, other[first]) if kinds else (first,):
            reason = mismatch(view, probe_tree, masks, drafts)
            if not reason:
                return Capability(masks)
    else:
        reason = "its attention implementation takes no tree masks"
    failure = mismatch(view, probe_chain, "own", drafts)
    if not failure:
        return Capability("own", f"batches and trees are out of reach: {reason}")
    if view.training:
        failure = f"it is in train mode, where {failure.removeprefix('its ')}: call model.eval()"
    return Capability(None, _more_than_keys(model) or failure)


def _more_than_keys(model: PreTrainedModel) -> str:
    """Empty if the model's own cache holds keys, values and states alone, else what else it holds."""
    try:
        layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    except AttributeError:  # a config that does not say how many layers there are
        return ""
    others = sorted({type(layer).__name__ for layer in layers if type(layer) not in CONTINUABLE_LAYERS})
    return f"its cache holds more than keys, values and states ({', '.join(others)})" if others else ""


@contextmanager
def _short_windows(model: PreTrainedModel) -> Iterator[None]:
    """Within this context its sliding windows are so short that the trials' texts reach past them."""
    config = model.config.get_text_config(decoder=True)
    types, window = layer_kinds(config), getattr(config, "sliding_window", None)
    slides = window is not None and (not types or SLIDING in types)
    try:
        if slides:
            config.sliding_window = WINDOW
        yield
    finally:
        if slides:
            config.sliding_window = window
