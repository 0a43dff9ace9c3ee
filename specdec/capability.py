"""`probe`: finds out how a model can be run by `ModelRunner`, by running it.

A tiny ragged batch with a branching draft, a commit that moves nodes and a pass after it, against the model's own
uncached forward pass. Decided once per model and mode, from its output, not from a list of names. Nothing that others
share is touched: what is tried is a view of the model, with its weights and with settings of its own.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PretrainedConfig, PreTrainedModel

from specdec import compat
from specdec.compat import CONTINUABLE_LAYERS
from specdec.releases import advice
from specdec.runner import (
    SLIDING,
    ModelRunner,
    cache_argument,
    default_masks,
    device_of,
    layer_kinds,
)
from specdec.source import declined, stand_in, takes_positions
from specdec.step import spread
from specdec.tree import DraftTree
from specdec.view import apart, in_eval_mode

log = logging.getLogger(__name__)

WINDOW = 4  # what sliding windows are set to for the probe, so that short texts reach past them


@dataclass(frozen=True)
class Capability:
    """What a model can be used for.

    Attributes:
        masks: "dict" or "tensor" (how it takes masks: trees and ragged batches), "own" (chains of one row), or None.
        reason: why it is not more, for warnings; empty for full capability.
        installation: the reason lies in the installed transformers, not in the model.
    """

    masks: str | None
    reason: str = ""
    installation: bool = False

    @property
    def trees(self) -> bool:
        return self.masks in ("dict", "tensor")

    def message(self, subject: str) -> str:
        """The reason, after its subject where that is to blame."""
        return self.reason if self.installation else f"{subject}: {self.reason}"


REMEMBERED = 8  # states of a model: whoever trains switches between two
_found: WeakKeyDictionary[PreTrainedModel, list[tuple[Any, Capability]]] = WeakKeyDictionary()


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
    devices = _devices(model)
    with torch.random.fork_rng(devices, device_type=devices[0].type if devices else "cpu"):
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


@torch.no_grad()
def probe(model: PreTrainedModel, drafts: bool = False) -> Capability:
    """Try the ways to run `model` from the most to the least capable; the first whose logits are right counts.

    drafts: it is a draft model, whose logits may be a little off, by weights in 8 bits say.
    """
    if compat.cache_argument(model) is None:
        return Capability(None, "its forward pass takes no cache")
    if spread(model):  # what gathers its weights cannot be copied, and nobody else can be decoding with it
        with _short_windows(model):
            return _without_random_numbers(model, _tried(model, model, drafts))
    try:
        view = apart(in_eval_mode(model) if drafts else model)
    except Exception as error:  # somebody's module may hold what cannot be copied: a lock, a file
        return Capability(None, f"its modules cannot be copied to be tried out: {error}")
    with _short_windows(view):
        return _without_random_numbers(view, _tried(model, view, drafts))


def _without_random_numbers(view: PreTrainedModel, found: Capability) -> Capability:
    """What was found, unless passes draw random numbers: plain decoding, which makes other passes, draws others."""
    if found.masks is None:
        return found
    before = _random_states(view)
    _last_logits(view, _token_ids(view, 4))
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


def _tried(model: PreTrainedModel, view: PreTrainedModel, drafts: bool) -> Capability:
    """What passes of `view`, which is `model` or has its weights, show."""
    reason = ""
    if model.config.get_text_config(decoder=True)._attn_implementation in ("sdpa", "eager"):
        other = {"dict": "tensor", "tensor": "dict"}
        first = default_masks(model)
        kinds = layer_kinds(model.config.get_text_config(decoder=True))
        for masks in (first, other[first]) if kinds else (first,):
            reason = _mismatch(view, _tree_trial, masks, drafts)
            if not reason:
                return Capability(masks)
    else:
        reason = "its attention implementation takes no tree masks"
    failure = _mismatch(view, _chain_trial, "own", drafts)
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


def _mismatch(model: PreTrainedModel, trial, masks: str, drafts: bool) -> str:
    """Empty if the trial's logits agree with the model's own, else what went wrong."""
    try:
        ours, reference = trial(model, masks)
    except Exception as error:  # a model may refuse a mask or a cache in any way it likes: that is the finding
        first_line = str(error).partition("\n")[0][:120]
        return f"its forward pass failed with {type(error).__name__}: {first_line}"
    difference = (ours.float() - reference.float()).abs().mean() / reference.float().std().clamp(min=1e-6)
    # Rounding is near 1e-6 in float32 and 1e-2 in bfloat16; a wrong mask or position shows as 0.1 to 1.
    bound = 1e-3 if model.dtype in (torch.float32, torch.float64) and not drafts else 0.1
    return "" if difference <= bound else f"its logits came out wrong by {float(difference):.2g} standard deviations"


def _tree_trial(model: PreTrainedModel, masks: str) -> tuple[Tensor, Tensor]:
    runner, device = ModelRunner(model, masks, source=stand_in(model, 2)), device_of(model)
    ids = _token_ids(model, 32)
    prompts = [ids[:7], ids[7:11]]
    drafts = torch.stack([ids[11:16], ids[16:21]])
    draft = DraftTree(drafts, torch.tensor([-1, 0, 0, 1, 2], device=device).expand(2, 5))
    padded = torch.stack([prompts[0], torch.cat([ids[:3], prompts[1]])])
    runner.start(2)
    runner.extend(padded, [0, 3])
    tree = runner.grow(drafts, draft.depth, draft.ancestors).logits  # (2, 5, V)
    # Row 0 takes the path root, 2, 4; row 1 its root alone. Then one more token each.
    runner.commit([3, 1], torch.tensor([[0, 2, 4], [0, 1, 2]], device=device))
    last = ids[21:23, None]
    eye = torch.ones(2, 1, 1, dtype=torch.bool, device=device)
    after = runner.grow(last, torch.zeros(2, 1, dtype=torch.long, device=device), eye).logits  # (2, 1, V)

    texts, picks = [], []
    for b in range(2):
        for leaf in ([0, 1, 3], [0, 2, 4]):
            texts.append(torch.cat([prompts[b], drafts[b, leaf]]))
            picks.append(tree[b, leaf])
    for b, path in ((0, [0, 2, 4]), (1, [0])):
        texts.append(torch.cat([prompts[b], drafts[b, path], last[b]]))
        picks.append(after[b])
    reference = [
        logits[len(text) - len(pick) : len(text)]
        for logits, text, pick in zip(_plain_logits(model, texts), texts, picks, strict=True)
    ]
    # Once with the model's own cache: some drop keys there that their uncached pass sees, and so does plain decoding.
    reference[0][-1:] = _last_logits(model, texts[0])
    return torch.cat(picks), torch.cat(reference)


def _chain_trial(model: PreTrainedModel, masks: str) -> tuple[Tensor, Tensor]:
    runner, device = ModelRunner(model, masks, source=stand_in(model, 1)), device_of(model)
    ids = _token_ids(model, 12)
    runner.start(1)
    picks = [runner.extend(ids[None, :6], [0]).logits[0]]
    depth = torch.arange(3, device=device)[None]
    ones = torch.ones(3, 3, dtype=torch.bool, device=device).tril()[None]
    chain = runner.grow(ids[None, 6:9], depth, ones, chain=True).logits[0]
    runner.commit([2])  # the third token is rejected
    after = runner.grow(ids[None, 9:11], depth[:, :2], ones[:, :2, :2], chain=True).logits[0]
    picks += [chain, after]
    text = torch.cat([ids[:8], ids[9:11]])
    whole, drafted = _plain_logits(model, [text, ids[:9]])
    accepted = torch.cat([whole[:-1], _last_logits(model, text)])
    reference = [accepted[5:6], drafted[6:9], accepted[8:10]]
    return torch.cat(picks), torch.cat(reference)


def _plain_logits(model: PreTrainedModel, texts: Sequence[Tensor]) -> Tensor:
    """(B, T, V) of texts without any cache, in one pass; behind a shorter one's end whatever comes."""
    longest = max(texts, key=len)
    padded = torch.stack([torch.cat([text, longest[len(text) :]]) for text in texts])
    return _run(model, padded, 0, use_cache=False).logits


def _last_logits(model: PreTrainedModel, text: Tensor) -> Tensor:
    """(1, V) after one text, the last token behind the others in the model's own cache, as in plain decoding."""
    past = cache_argument(model)
    read = _run(model, text[None, :-1], 0, use_cache=True)
    return _run(model, text[None, -1:], len(text) - 1, use_cache=True, **{past: read[past]}).logits[0]


def _run(model: PreTrainedModel, texts: Tensor, start: int, **options: Any) -> Any:
    """The model's own pass over texts (B, T), whose first token stands at `start`."""
    inputs = {"input_ids": texts, "return_dict": True, **declined(model), **options, **_positions(model, texts, start)}
    source = stand_in(model, len(texts))
    return model(**(inputs if source is None else source.read_by(model, inputs)))


def _positions(model: PreTrainedModel, texts: Tensor, start: int) -> dict[str, Tensor]:
    """As `generate()` numbers them, from zero; RoBERTa's own forward pass would start at another number."""
    if not takes_positions(model):
        return {}
    positions = torch.arange(start, start + texts.shape[1], device=texts.device)
    return {"position_ids": positions.expand(len(texts), -1)}


def _token_ids(model: PreTrainedModel, count: int) -> Tensor:
    """Some ids spread over the vocabulary, always the same; end and padding ids avoided."""
    config = model.config.get_text_config(decoder=True)
    ends = getattr(config, "eos_token_id", None)
    special = {getattr(config, "pad_token_id", None), getattr(config, "bos_token_id", None)}
    special |= set(ends) if isinstance(ends, list) else {ends}
    size = config.vocab_size
    ids = [i for i in ((7919 * k + 13) % size for k in range(4 * count)) if i not in special]
    return torch.tensor(ids[:count], device=device_of(model))


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
