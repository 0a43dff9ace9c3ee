"""Estimate of what the evaluations of a run cost, for `plan`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from specdec.data.packed_dataset import PackedTexts
from specdec.data.texts import Texts
from specdec.training.evaluate import NEW_TOKENS, TREE
from specdec.training.recipe import Recipe

ROWS = TREE.size + 1  # tokens of a pass over a tree; the rows of the product that is measured


@dataclass(frozen=True)
class EvaluationCost:
    """Cost of the evaluations of a run.

    Attributes:
        texts: number of held-out texts.
        decodings: number of evaluations with the decoder.
        losses: number of measurements of the held-out loss.
        decoding: floating-point operations of the first, if no draft is accepted, over few tokens at a time.
        loss: operations of the second, over many tokens at a time.
    """

    texts: int
    decodings: int
    losses: int
    decoding: float
    loss: float


def evaluation_cost(
    recipe: Recipe, held_out: Texts, updates: int, *, target: int, head: int, forward: int
) -> EvaluationCost:
    """Estimate the cost of the evaluations of a run.

    Args:
        recipe: options of the run.
        held_out: held-out texts.
        updates: number of updates.
        target: parameters of the target.
        head: parameters of the head.
        forward: floating-point operations of the head over one row.
    """
    decodings, losses = evaluations(recipe, updates)
    texts, tokens, rows = len(held_out), len(held_out.ids), len(PackedTexts(held_out, recipe.length))
    chain, deepest = recipe.drafted, TREE.depth * TREE.top_k
    # A round of a chain, of a tree at T = 0 and of one at T = 1: the target reads the draft, which the head wrote.
    read, written = chain + 1 + 2 * ROWS, chain + 2 * deepest
    rounds = 2 * (target * read + head * written) * NEW_TOKENS * texts
    prompts = 2 * (3 * (target + head) + target) * tokens  # read for each decoding, and for teacher forcing
    known = recipe.cache_states or recipe.teacher is not None  # the target's states are not computed here
    return EvaluationCost(
        texts=texts,
        decodings=decodings,
        losses=losses,
        decoding=float(decodings * (rounds + prompts)),
        loss=float(losses * (forward * rows + (0 if known else 2 * target * tokens))),
    )


def evaluations(recipe: Recipe, updates: int) -> tuple[int, int]:
    """Return how often a run decodes held-out texts, and how often it measures their loss.

    Examples:
        >>> from pathlib import Path
        >>> evaluations(Recipe("target", Path("data"), Path("out"), evaluate_every=500, save_every=100), 1010)
        (3, 11)
    """
    at_start = recipe.start_from is not None
    decodings, losses = (
        math.ceil(updates / every) + at_start if every else 0 for every in (recipe.evaluate_every, recipe.save_every)
    )
    return decodings, losses
