"""`probe`: finds out how `ModelRunner` can run a model, by running it.

The probe runs a tiny ragged batch with a branching draft, a commit that moves nodes, and a pass after it. It compares
the logits with those of the model's own uncached forward pass. The result depends on these logits, not on a list of
model names, and is kept per model and mode. The probe runs a view that shares the model's weights but not its settings,
so that it changes nothing that other threads use.
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
from specdec.models.hidden_states import foreign_code
from specdec.models.introspection import SLIDING, device_of, is_sharded, layer_kinds
from specdec.models.position_limits import positions_of
from specdec.models.probe import last_logits, mismatch, probe_chain, probe_tree, token_ids
from specdec.models.views import apart, in_eval_mode
from specdec.utils.recent import Recent
from specdec.utils.releases import advice

log = logging.getLogger(__name__)

WINDOW = 4  # sliding window during the probe, shorter than its texts


@dataclass(frozen=True)
class Capability:
    """The kinds of drafts that a model can verify or make.

    Attributes:
        masks: "dict" or "tensor" (mask format of a model that can run trees and ragged batches), "own" (only chains of
            one row), or None (no drafts).
        reason: why the model cannot do more, for warnings; empty for full capability.
        installation: True if the reason lies in the installed transformers, not in the model.
        positions: number of positions at which a pass can place tokens; None: unlimited.
    """

    masks: str | None
    reason: str = ""
    installation: bool = False
    positions: int | None = None

    @property
    def trees(self) -> bool:
        """True if the model can run draft trees and ragged batches."""
        return self.masks in ("dict", "tensor")

    def message(self, subject: str) -> str:
        """Return the reason, preceded by `subject` if the model is the cause."""
        return self.reason if self.installation else f"{subject}: {self.reason}"


REMEMBERED = 32  # results kept per model: training switches between two settings, and hooks may come and go
_found: WeakKeyDictionary[PreTrainedModel, Recent[Capability]] = WeakKeyDictionary()
_usual_states: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()
_known_positions: WeakKeyDictionary[PreTrainedModel, int | None] = WeakKeyDictionary()


def capability(model: PreTrainedModel, drafts: bool = False) -> Capability:
    """Return the result of `probe(model)`, kept until its config, precision, device, mode, modules or hooks change.

    The state of the random number generators is restored: a model in train mode draws numbers for its dropout.

    Args:
        model: the model.
        drafts: True for a draft model, which runs in eval mode.
    """

    def probed() -> Capability:
        log.info("probing whether %s can run draft trees, only chains, or no drafts", type(model).__name__)
        with _same_random_numbers(model):
            found = probe(model, drafts)
            fault = "" if found.trees else installation_fault()
        return replace(found, reason=fault, installation=True) if fault else found

    return _found.setdefault(model, Recent(REMEMBERED)).get(settings_of(model, drafts), probed)


@functools.cache
def installation_fault() -> str:
    """Return why specdec does not work with the installed transformers; empty if a tiny Llama passes the probe.

    This tells an unsupported release of transformers from a limit of the user's model.
    """
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "max_position_embeddings": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    try:
        with torch.device("cpu"), torch.random.fork_rng([]):
            found = probe(LlamaForCausalLM(LlamaConfig(**sizes, **heads)).float().eval())
    except Exception as error:  # a release that changed so much that the probe itself fails
        found = Capability(None, f"{type(error).__name__}: {error}")
    if found.trees:
        return ""
    return (
        f"specdec does not work with the installed transformers, not even for a tiny Llama ({found.reason}). {advice()}"
    )


def settings_of(model: PreTrainedModel, drafts: bool = False) -> Any:
    """Collect the settings that a model's passes depend on, without the values of its weights.

    Hooks and replaced passes do not count where several processes run one model, as one alone must not probe it again.
    """
    modules = [] if drafts else [*model.modules()]
    # Dropout rates, gradient checkpointing, ...
    modes = [
        [value for value in vars(module).values() if isinstance(value, (bool, float))]
        for module in modules
        if module.training
    ]
    code = [(type(module), foreign_code(module)) for module in modules]
    if any(foreign for _, foreign in code) and (is_sharded(model) or compat.tensor_parallel_mesh(model) is not None):
        code = [(kind, ()) for kind, _ in code]
    return drafts, model.dtype, device_of(model), _said(model.config), modes, code


def _said(value: Any) -> Any:
    """Copy a config's values, lists and dictionaries; other objects are represented by their id."""
    if isinstance(value, PretrainedConfig):
        value = vars(value)
    if isinstance(value, dict):
        return {name: _said(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_said(each) for each in value]
    return value if isinstance(value, (str, int, float, torch.dtype, type(None))) else id(value)


def draft_positions(model: PreTrainedModel) -> int | None:
    """Number of positions of a draft model, found once per model; None: unlimited, at least for its drafts."""
    if model not in _known_positions:
        with _same_random_numbers(model):
            _known_positions[model] = positions_of(apart(in_eval_mode(model)))
    return _known_positions[model]


@torch.no_grad()
def has_usual_hidden_states(model: PreTrainedModel) -> bool:
    """Return True if all of a model's hidden states are (B, T, H), found once per model."""
    if model.config.is_encoder_decoder or is_sharded(model):
        return True
    if model not in _usual_states:
        with _same_random_numbers(model):
            output = apart(model)(token_ids(model, 2)[None], output_hidden_states=True, use_cache=False)
        states = output.get("hidden_states")
        _usual_states[model] = states is not None and all(each.dim() == 3 for each in states)
    return _usual_states[model]


def _same_random_numbers(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Context that restores the random number generators which passes of the model may use."""
    devices = _devices(model)
    return torch.random.fork_rng(devices, device_type=devices[0].type if devices else "cpu")


@torch.no_grad()
def probe(model: PreTrainedModel, drafts: bool = False) -> Capability:
    """Try mask formats from the most to the least capable, and return the first with the right logits.

    Args:
        model: the model.
        drafts: True for a draft model, whose logits may be slightly off (for example with 8-bit weights).
    """
    if compat.cache_argument(model) is None:
        return Capability(None, "its forward pass takes no cache")
    if is_sharded(model):  # the hooks that gather weights cannot be copied, and no other call can use the model now
        with short_windows(model):
            found = _without_random_numbers(model, _probed(model, model, drafts))
            return replace(found, positions=positions_of(model))
    try:
        view = apart(in_eval_mode(model) if drafts else model)
    except Exception as error:  # a user's module may hold an object that cannot be copied: a lock, a file
        return Capability(None, f"its modules cannot be copied for the probe: {error}")
    with short_windows(view):
        found = _without_random_numbers(view, _probed(model, view, drafts))
        return replace(found, positions=positions_of(view))


def _without_random_numbers(view: PreTrainedModel, found: Capability) -> Capability:
    """Return `found`, unless passes draw random numbers: plain decoding runs other passes and would draw others."""
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
    """Devices of a model's weights that have a random number generator, except the CPU."""
    return sorted(
        {weight.device for weight in model.parameters() if weight.device.type not in ("cpu", "meta")}, key=str
    )


def _probed(model: PreTrainedModel, view: PreTrainedModel, drafts: bool) -> Capability:
    """Run the probes on `view`, which is `model` or shares its weights."""
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
        reason = 'its attention implementation takes no tree masks; attn_implementation="sdpa" does'
    failure = mismatch(view, probe_chain, "own", drafts)
    if not failure:
        return Capability("own", f"batches and trees are out of reach: {reason}")
    if view.training:
        failure = f"it is in train mode, where {failure.removeprefix('its ')}: call model.eval()"
    return Capability(None, _more_than_keys(model) or failure)


def _more_than_keys(model: PreTrainedModel) -> str:
    """Describe what the model's own cache holds besides keys, values and states; empty if nothing."""
    try:
        layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    except AttributeError:  # a config that does not say how many layers there are
        return ""
    others = sorted({type(layer).__name__ for layer in layers if type(layer) not in CONTINUABLE_LAYERS})
    return f"its cache holds more than keys, values and states ({', '.join(others)})" if others else ""


@contextmanager
def short_windows(model: PreTrainedModel) -> Iterator[None]:
    """Context in which the model's sliding windows are shorter than the probes' texts."""
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
