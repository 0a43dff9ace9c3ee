"""Comparison of a draft model's vocabulary and tokenizer with the target's."""

from __future__ import annotations

from transformers import PreTrainedModel

from specdec.proposers.context import LARGEST_PADDING
from specdec.utils.tokenizer_files import load_tokenizer


def what_differs(model: PreTrainedModel, target: PreTrainedModel) -> str | None:
    """Describe how the vocabularies of a draft model and a target differ; None if they are the same."""
    ours, theirs = (m.config.get_text_config(decoder=True).vocab_size for m in (model, target))
    if abs(ours - theirs) > LARGEST_PADDING:
        return f"the draft model's vocabulary has {ours} tokens and the target's {theirs}: they don't share a tokenizer"
    differing = _first_difference(_vocabulary_of(model), _vocabulary_of(target))
    if differing is None:
        return None
    return (
        f"the draft model's tokenizer ({model.name_or_path}) and the target's ({target.name_or_path}) differ, at token "
        f"id {differing} first"
    )


def tokenizers_at_hand(model: PreTrainedModel, target: PreTrainedModel) -> bool:
    """Return whether both models' tokenizers are available locally, next to their weights."""
    return _vocabulary_of(model) is not None and _vocabulary_of(target) is not None


def _vocabulary_of(model: PreTrainedModel) -> dict[int, str] | None:
    """The tokens of the tokenizer next to the model's weights, by id; None if it is not available locally."""
    if not model.name_or_path:
        return None
    try:
        tokenizer = load_tokenizer(model.name_or_path, local_files_only=True)
    except Exception:  # no tokenizer, or one that needs a package which is not installed: nothing to compare
        return None
    return {index: token for token, index in tokenizer.get_vocab().items()}


def _first_difference(ours: dict[int, str] | None, theirs: dict[int, str] | None) -> int | None:
    """The lowest token id whose tokens differ, or None."""
    if ours is None or theirs is None:
        return None
    return min((index for index in ours.keys() & theirs.keys() if ours[index] != theirs[index]), default=None)
