"""The head that training begins with: a fresh one, one to go on from, or another target's that is carried over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from specdec.data.texts import Text
from specdec.eagle3.checkpoint import load
from specdec.eagle3.head import Eagle3Head
from specdec.eagle3.layouts import save
from specdec.eagle3.registry import WEIGHTS
from specdec.proposers.draft_model import load as load_model
from specdec.proposers.eagle3 import Eagle3Proposer
from specdec.training.draft_vocabulary import frequent_tokens, token_counts
from specdec.training.initialisation import extend_vocabulary, initialize
from specdec.training.recipe import DRAFT_VOCAB, Recipe
from specdec.training.run_folder import RunFolder
from specdec.training.transfer import transfer_head

TRANSFER_TOKENS = 4  # per entry of the states that a carried over head reads


def given_head(recipe: Recipe) -> Eagle3Head | None:
    """The head to go on from, if there is one."""
    if recipe.start_from is None:
        return None
    if recipe.intermediate_size is not None:
        raise ValueError("a head to go on from has an MLP of its own: leave out --intermediate-size")
    if not recipe.attention_bias:
        raise ValueError("a head to go on from keeps its attention: leave out --no-attention-bias")
    head = load(recipe.start_from)
    if head.config.version != 3:
        raise ValueError(f"{recipe.start_from} is an EAGLE-1 or EAGLE-2 head: only EAGLE-3 heads can be trained")
    return head


def starting_head(
    recipe: Recipe,
    given: Eagle3Head | None,
    target: PreTrainedModel,
    texts: Sequence[Text],
    folder: RunFolder,
    processes: PartialState,
) -> Eagle3Head:
    """The head before its first update; `given` is what `given_head` loaded."""
    torch.manual_seed(recipe.seed)
    size = target.config.get_text_config(decoder=True).vocab_size
    written = token_counts([(text.ids, text.learn) for text in texts], size)
    if given is None:
        head = _fresh(recipe, target, written)
    else:
        if recipe.start_from_target is None:
            Eagle3Proposer(given).check(target)
        if recipe.draft_vocab is not None and recipe.draft_vocab < len(given.d2t):
            raise ValueError(
                f"{recipe.start_from} drafts {len(given.d2t)} tokens already: choose a larger --draft-vocab or none"
            )
        head = given
        if recipe.start_from_target is not None:
            head = _transferred(recipe, given, recipe.start_from_target, target, texts, folder, processes)
        if recipe.draft_vocab is not None:
            counts = written[: head.config.vocab_size].index_fill(0, head.draft_to_target, written.sum() + 1)
            head = extend_vocabulary(head, target, frequent_tokens(counts, recipe.draft_vocab))
    covered = float(written[head.draft_to_target].sum() / written.sum().clamp(min=1))
    processes.print(
        f"the {len(head.draft_to_target)} tokens of the draft vocabulary are {100 * covered:.1f}% of what it writes"
    )
    return head


def _fresh(recipe: Recipe, target: PreTrainedModel, written: Tensor) -> Eagle3Head:
    """written: (V,) int64, counts of tokens."""
    return initialize(target, frequent_tokens(written, recipe.draft_vocab or DRAFT_VOCAB), **fresh_changes(recipe))


def fresh_changes(recipe: Recipe) -> dict[str, Any]:
    """What of a fresh head's config the recipe says, see `initialize`."""
    changes: dict[str, Any] = {}
    if recipe.intermediate_size is not None:
        changes["intermediate_size"] = recipe.intermediate_size
    if not recipe.attention_bias:
        changes["attention_bias"] = False
    return changes


def _transferred(
    recipe: Recipe,
    head: Eagle3Head,
    donor_name: str,
    target: PreTrainedModel,
    texts: Sequence[Text],
    folder: RunFolder,
    processes: PartialState,
) -> Eagle3Head:
    """A head of another target's, made into one for this; made once, and kept in the folder."""
    kept = folder.transferred
    ours = folder.identity() is not None  # else what lies there may be of a run with other options
    if processes.is_main_process and not (ours and (kept / WEIGHTS).exists()):
        its, mine = (AutoTokenizer.from_pretrained(name).get_vocab() for name in (donor_name, recipe.target))
        if its != mine:
            raise ValueError(
                f"{donor_name} and {recipe.target} have different tokens, so a head of one is no start for the "
                "other's: choose a model of the same family, or leave out --from to train a fresh head"
            )
        donor = load_model(donor_name).to(target.device)
        width = 3 * target.config.get_text_config(decoder=True).hidden_size
        enough = texts[:: max(1, sum(len(text.ids) for text in texts) // (TRANSFER_TOKENS * width))]
        print(f"carrying {recipe.start_from} over from {donor_name}: both models read {len(enough)} texts")
        with folder.clear_failures("use a shorter --length"):
            save(transfer_head(head, donor, target, enough), kept)
    processes.wait_for_everyone()
    return load(kept)
