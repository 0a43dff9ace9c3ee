"""Texts of a run: those to train on, and those held out for evaluation."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable

from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase

from specdec.data.conversations import context_of, read_texts
from specdec.data.survey import survey
from specdec.data.texts import Text, Texts, load_texts, save_texts
from specdec.models.introspection import end_tokens_in, marks_of, require_decoder_only
from specdec.training.recipe import Recipe
from specdec.training.run_folder import RunFolder
from specdec.utils.parsing import read_by_library


def checksum_of_entries(recipe: Recipe) -> str:
    """Compute the checksum of the given texts, before any chat template. Raises the errors of `survey`."""
    return survey(recipe.data, recipe.held_out_data).checksum


def check_target(recipe: Recipe) -> None:
    """Raise ValueError if the target is no decoder-only model, or rows are longer than its context."""
    with read_by_library(f"the config of {recipe.target}"):
        config = AutoConfig.from_pretrained(recipe.target)
    require_decoder_only(config, recipe.target)
    context = context_of(config)
    if recipe.length > context:
        raise ValueError(
            f"{recipe.target} reads {context} tokens at most, --length is {recipe.length}: choose a smaller one"
        )


def write_corpus(recipe: Recipe, folder: RunFolder, tokenizer: PreTrainedTokenizerBase, checksum: str) -> None:
    """Encode the training and held-out texts into the folder's files, one by one.

    Files of an earlier run with the same `checksum_of_entries` stay, because a chat template may contain the date.
    """
    before = folder.identity() or {}
    if before.get("texts") == checksum and folder.training_texts.exists() and folder.held_out.exists():
        return
    marks, ends = marks_of(AutoConfig.from_pretrained(recipe.target)), ends_of(recipe.target)
    texts = read_texts(recipe.data, tokenizer, recipe.length, marks, ends, limit=recipe.max_texts)
    if recipe.held_out_data is None:
        held_out, training_texts = _split(texts, recipe, folder)
    else:  # the smaller file first: if it cannot be used, this is found at once
        held_out = save_texts(read_texts(recipe.held_out_data, tokenizer, recipe.length, marks, ends), folder.held_out)
        training_texts = save_texts(texts, folder.training_texts)
    seen = _among(held_out, training_texts)
    if seen:
        copies = "repeated texts" if recipe.held_out_data is None else "them from one of the files"
        warnings.warn(
            f"{seen} of the {len(held_out)} texts to evaluate on are also trained on, so the evaluation is too "
            f"optimistic: remove {copies}"
        )


def ends_of(target: str) -> list[int]:
    """Return the tokens that end a target's texts, from its generation config, or else from its config."""
    try:
        return end_tokens_in(GenerationConfig.from_pretrained(target))
    except OSError:
        return end_tokens_in(GenerationConfig.from_model_config(AutoConfig.from_pretrained(target)))


def corpus(folder: RunFolder) -> tuple[Texts, Texts]:
    """Open the texts that `write_corpus` wrote: those to train on, and those held out."""
    return load_texts(folder.training_texts), load_texts(folder.held_out)


def _split(texts: Iterable[Text], recipe: Recipe, folder: RunFolder) -> tuple[Texts, Texts]:
    """Hold out texts at even intervals, write both sets, and return them: held-out texts first."""
    every, count = folder.training_texts.with_name("every_text"), recipe.held_out
    whole = save_texts(texts, every)  # their number is known only after all are read
    every.unlink()  # the data stays available while it is mapped
    if len(whole) <= count:
        raise ValueError(
            f"{recipe.data} holds {len(whole)} texts and {count} are held out, so none is left to train on: choose a "
            "smaller --held-out"
        )
    apart = {i * len(whole) // count for i in range(count)}
    held_out = save_texts((whole[i] for i in sorted(apart)), folder.held_out)
    return held_out, save_texts((text for i, text in enumerate(whole) if i not in apart), folder.training_texts)


def _among(some: Texts, others: Texts) -> int:
    """Count the texts of `some` that are also in `others`."""
    known: dict[tuple[int, ...], int] = Counter(tuple(text.ids.tolist()) for text in some)
    return sum(known.pop(tuple(text.ids.tolist()), 0) for text in others)
