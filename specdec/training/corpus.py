"""The texts of a run: those that are learnt from, and those that are held out to evaluate on."""

from __future__ import annotations

import hashlib
import json
import warnings
from itertools import islice

from transformers import AutoConfig, PreTrainedTokenizerBase

from specdec.data.conversations import context_of, read_texts
from specdec.data.entries import read_entries
from specdec.data.texts import Text, kept_texts
from specdec.training.recipe import Recipe
from specdec.training.run_folder import RunFolder


def checksum_of_entries(recipe: Recipe) -> str:
    """Of the texts as they were given, before any template."""
    content = hashlib.sha256()
    for file in (recipe.data, recipe.held_out_data):
        for _, entry in read_entries(file) if file is not None else ():
            content.update(json.dumps(entry, sort_keys=True, default=str).encode())
    return content.hexdigest()


def corpus(
    recipe: Recipe, folder: RunFolder, tokenizer: PreTrainedTokenizerBase, checksum: str
) -> tuple[list[Text], list[Text]]:
    """To learn from and held out: as an earlier run read them, for a chat template may show the date.

    Args:
        checksum: of the entries, as `checksum_of_entries` gives it.
    """
    context = context_of(AutoConfig.from_pretrained(recipe.target))
    if recipe.length > context:
        raise ValueError(
            f"{recipe.target} reads {context} tokens at most, --length is {recipe.length}: choose a smaller one"
        )
    before = folder.identity() or {}
    if before.get("texts") == checksum and folder.learnt.exists() and folder.held_out.exists():
        return kept_texts(folder.learnt), kept_texts(folder.held_out)
    texts = list(islice(read_texts(recipe.data, tokenizer, recipe.length), recipe.max_texts))
    if recipe.held_out_data is None:
        return _split(texts, recipe)
    held_out = list(read_texts(recipe.held_out_data, tokenizer, recipe.length))
    learnt = {tuple(text.ids.tolist()) for text in texts}
    seen = sum(tuple(text.ids.tolist()) in learnt for text in held_out)
    if seen:
        warnings.warn(f"{seen} of the {len(held_out)} texts to evaluate on are learnt from, too")
    return texts, held_out


def _split(texts: list[Text], recipe: Recipe) -> tuple[list[Text], list[Text]]:
    """Held out are texts evenly over the data."""
    count = recipe.held_out
    if len(texts) <= count:
        raise ValueError(
            f"{recipe.data} holds {len(texts)} texts and {count} are held out: none is left. Choose a smaller "
            "--held-out"
        )
    apart = {i * len(texts) // count for i in range(count)}
    return [text for i, text in enumerate(texts) if i not in apart], [texts[i] for i in sorted(apart)]
