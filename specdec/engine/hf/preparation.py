"""`prepares_otherwise`: finds out whether a class prepares the inputs of its passes in a way of its own."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.utils import GenerationMixin

from specdec.models.compat import CACHE
from specdec.models.probe import token_ids

TOKENS = 16
_found: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def prepares_otherwise(model: PreTrainedModel) -> bool:
    """Return True if `prepare_inputs_for_generation` of a user's class gives other inputs than transformers' own.

    Its own is what drafts are run with. Classes of transformers are known. The result is kept per model.
    """
    if type(model).prepare_inputs_for_generation.__module__.startswith("transformers."):
        return False
    if model not in _found:
        _found[model] = _differs(model)
    return _found[model]


def _differs(model: PreTrainedModel) -> bool:
    """Compare the inputs of a first pass, and of a later one over a token after a cache."""
    ids = token_ids(model, TOKENS).view(2, -1)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 0)
    cache, states = DynamicCache(), torch.zeros(2, 1, ids.shape[1] - 1, 2, device=ids.device)
    cache.update(states, states, 0)
    first = {"attention_mask": mask, "position_ids": positions, "use_cache": True, "is_first_iteration": True}
    later = first | {"position_ids": positions[:, -1:], "is_first_iteration": False, "next_sequence_length": 1}
    for given, seen in ((first, mask), (later | {CACHE: cache}, mask[:, -1:])):
        usual = GenerationMixin.prepare_inputs_for_generation(model, ids, **given)
        try:
            own = model.prepare_inputs_for_generation(ids.clone(), **given)
            if any(not _same(own.get(name), usual.get(name), seen) for name in {*own, *usual}):
                return True
        except Exception:  # it expects what only its own calls have
            return True
    return False


def _same(one: Any, other: Any, seen: Tensor) -> bool:
    """Compare two inputs. Positions (B, T) count where tokens are `seen`."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        counts = seen.bool() if one.shape == seen.shape else torch.ones((), dtype=torch.bool, device=one.device)
        return one.shape == other.shape and bool(((one == other) | ~counts).all())
    return one is other or bool(one == other)
