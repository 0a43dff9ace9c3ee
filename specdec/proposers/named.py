"""Proposers by their short names: `"ngram"`, `"draft:PATH_OR_ID"`, `"auto"` and the others.

Owns the names and what they stand for. Knows nothing of the loop.
"""

from __future__ import annotations

import re
import warnings

from torch import nn
from transformers import PreTrainedModel

from specdec.eagle3 import registry
from specdec.proposers.base import Proposer
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.eagle3 import Eagle3Proposer
from specdec.proposers.hybrid import HybridProposer
from specdec.proposers.ngram import NgramProposer
from specdec.proposers.suffix import SuffixProposer

WITH_NGRAMS = "ngram+"
PROPOSERS = re.compile(r"ngram|suffix|auto|(ngram\+)?(eagle3|(draft|eagle3):.+)")
PROPOSERS_IN_WORDS = (
    '"ngram", "suffix", "draft:PATH_OR_ID", "eagle3" (a known head), "eagle3:PATH_OR_ID", "ngram+draft:PATH_OR_ID", '
    '"ngram+eagle3", "ngram+eagle3:PATH_OR_ID" or "auto"'
)


def check_name(proposer: str) -> None:
    """Raise ValueError unless it is one of the short forms."""
    first, plus, last = proposer.rpartition("+")
    if plus and last == "ngram":
        raise ValueError(f'n-grams come first: "{WITH_NGRAMS}{first}", got {proposer!r}')
    if not PROPOSERS.fullmatch(proposer):
        raise ValueError(f"proposer must be {PROPOSERS_IN_WORDS}, got {proposer!r}")


def as_proposer(proposer: Proposer | PreTrainedModel | str, target: PreTrainedModel) -> Proposer:
    """A `Proposer` from an object, a loaded draft model, or a short string."""
    if isinstance(proposer, Proposer):
        return proposer
    if isinstance(proposer, nn.Module):
        return DraftModelProposer(proposer)
    if not isinstance(proposer, str):
        raise ValueError(
            f"proposer must be a Proposer (an instance), a loaded draft model, {PROPOSERS_IN_WORDS}, got {proposer!r}"
        )
    check_name(proposer)
    kind, _, source = proposer.partition(":")
    if kind == "suffix":
        return SuffixProposer()
    if kind.startswith(WITH_NGRAMS):
        return HybridProposer(as_proposer(proposer.removeprefix(WITH_NGRAMS), target))
    if kind == "draft":
        return DraftModelProposer(source)
    if kind == "eagle3":
        return Eagle3Proposer(source or registry.find(target))
    head = _known_head(target) if kind == "auto" else None
    return NgramProposer() if head is None else HybridProposer(head)


def _known_head(target: PreTrainedModel) -> Proposer | None:
    """The registry's head if there is one, it is at hand and fits; "auto" is content with n-grams."""
    if registry.known(target) is None:
        return None
    try:
        proposer = Eagle3Proposer(registry.find(target))
        proposer.check(target)
    except (ValueError, OSError) as error:
        warnings.warn(f'"auto" drafts with n-grams: {error}')
        return None
    return proposer
