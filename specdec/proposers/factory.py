"""Construction of proposers from their short names in `choices`: `"ngram"`, `"draft:PATH_OR_ID"`, `"auto"` etc."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from os import PathLike, fspath
from reprlib import repr as shortened
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from specdec.heads import registry
from specdec.heads.mtp.loading import at_hand
from specdec.heads.small_models import advice
from specdec.proposers.base import Proposer
from specdec.proposers.draft_heads.block import BlockProposer
from specdec.proposers.draft_heads.eagle3 import Eagle3Proposer
from specdec.proposers.draft_heads.hydra import HydraProposer
from specdec.proposers.draft_heads.mtp import MtpProposer
from specdec.proposers.draft_models.assistant import AssistantProposer, is_assistant
from specdec.proposers.draft_models.draft_model import DraftModelProposer
from specdec.proposers.draft_models.early_exit import EarlyExitProposer
from specdec.proposers.draft_models.translated import TranslatedDraftProposer
from specdec.proposers.draft_models.vocabularies import tokenizers_at_hand, what_differs
from specdec.proposers.hybrid import HybridProposer
from specdec.proposers.lookup.ngram import NgramProposer
from specdec.proposers.lookup.suffix import SuffixProposer
from specdec.utils.choices import PROPOSERS_IN_WORDS, WITH_NGRAMS, ProposerName, check_name
from specdec.utils.paths import located

PATIENCE = 60.0  # seconds, time limit for a download that the user did not request by name


def as_proposers(names: Sequence[str], target: PreTrainedModel) -> dict[str, Proposer]:
    """Build several proposers from their names. A model or head that two of them use is loaded once."""
    made: dict[str, Proposer] = {}
    for name in names:
        check_name(name)
    for name in names:
        alone = name.removeprefix(WITH_NGRAMS)
        if alone not in made:
            made[alone] = as_proposer(alone, target)
        made[name] = HybridProposer(made[alone]) if name != alone else made[alone]
    return {name: made[name] for name in names}


def as_proposer(
    proposer: Proposer | PreTrainedModel | ProposerName | str,
    target: PreTrainedModel,
    tokenizers: tuple[Any, Any] = (None, None),
) -> Proposer:
    """Build a `Proposer` from a proposer, a loaded draft model, a path, or a short name.

    A draft model that is loaded here gets the target's dtype and device.

    Args:
        proposer: the proposer, model, path or name. A `Proposer` is returned unchanged.
        target: the target model.
        tokenizers: tokenizers of the target and of the draft model; None where unknown.

    Returns:
        The proposer, not yet checked against the target.

    Raises:
        ValueError: the name is unknown, or there is no known head for the target.
    """
    if isinstance(proposer, Proposer):
        return proposer
    if isinstance(proposer, nn.Module):
        return _draft_model(proposer, target, tokenizers)
    if isinstance(proposer, PathLike):
        proposer = fspath(proposer)
    if isinstance(proposer, type) and issubclass(proposer, Proposer):
        raise ValueError(
            f"proposer must be an instance, got the class {proposer.__name__}: write {proposer.__name__}()"
        )
    if not isinstance(proposer, str):
        raise ValueError(
            f"proposer must be an instance of Proposer, a loaded draft model, {PROPOSERS_IN_WORDS}, got "
            f"{shortened(proposer)}"
        )
    check_name(proposer)
    kind, _, argument = proposer.removeprefix(WITH_NGRAMS).partition(":")
    made = BUILDERS[kind](located(argument), target)
    return HybridProposer(made) if proposer.startswith(WITH_NGRAMS) else made


def _draft_model(
    model: PreTrainedModel | str, target: PreTrainedModel, tokenizers: tuple[Any, Any] = (None, None)
) -> Proposer:
    """Build a `DraftModelProposer`, a `TranslatedDraftProposer` if the tokenizers differ, or an `AssistantProposer`."""
    if is_assistant(model):
        return AssistantProposer(model)
    proposer = DraftModelProposer(model, like=target)
    if None not in tokenizers and tokenizers[0].get_vocab() != tokenizers[1].get_vocab():
        return TranslatedDraftProposer(model, like=target, target_tokenizer=tokenizers[0], tokenizer=tokenizers[1])
    if what_differs(proposer.model, target) is not None and tokenizers_at_hand(proposer.model, target):
        return TranslatedDraftProposer(model, like=target)
    return proposer


def _head_at_hand(target: PreTrainedModel) -> Proposer | None:
    """The head for "auto": the registry's, else the target's own MTP layers. None if there is none that fits."""
    known = registry.known(target)
    if known is None and not at_hand(target):
        name = registry.name_of(target)
        warnings.warn(
            f'"auto" drafts with n-grams: no head is known for {name or type(target).__name__}. What may be faster: '
            f"{advice(name)}"
        )
        return None
    try:
        name = "mtp" if known is None else f"{known.kind}:{registry.find(target, known.kind, PATIENCE)}"
        proposer = as_proposer(name, target)
        proposer.check(target)
    except (ValueError, OSError) as error:
        warnings.warn(f'"auto" drafts with n-grams: {error}')
        return None
    return proposer


def _automatic(argument: str, target: PreTrainedModel) -> Proposer:
    head = _head_at_hand(target)
    return NgramProposer() if head is None else HybridProposer(head)


# For each of `choices.PROPOSER_KINDS`, from its argument (a local path, or "") and the target.
BUILDERS: dict[str, Callable[[str, PreTrainedModel], Proposer]] = {
    "ngram": lambda argument, target: NgramProposer(),
    "suffix": lambda argument, target: SuffixProposer(),
    "draft": _draft_model,
    "eagle3": lambda argument, target: Eagle3Proposer(argument or registry.find(target, "eagle3")),
    "dflash": lambda argument, target: BlockProposer(argument or registry.find(target, "dflash")),
    "medusa": lambda argument, target: BlockProposer(argument),
    "hydra": lambda argument, target: HydraProposer(argument),
    "mtp": lambda argument, target: MtpProposer(argument or None),
    "exit": lambda argument, target: EarlyExitProposer(int(argument)),
    "auto": _automatic,
}
