"""`prepares_otherwise`: finds out whether a class prepares the inputs of its passes in a way of its own."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.utils import GenerationMixin

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
    ids = token_ids(model, TOKENS).view(2, -1)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    given: dict[str, Any] = {"attention_mask": mask, "use_cache": True}
    try:
        own = model.prepare_inputs_for_generation(ids.clone(), **given)
    except Exception:  # it expects what only its own calls have
        return True
    usual = GenerationMixin.prepare_inputs_for_generation(model, ids, **given)
    return any(not _same(own.get(name), usual.get(name)) for name in {*own, *usual} - {"use_cache"})


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one.long(), other.long())
    return bool(one is other or (not isinstance(one, Tensor) and not isinstance(other, Tensor) and one == other))
