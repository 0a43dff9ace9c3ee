"""`code_of`: code that builds a proposer which was measured, to paste; `imports`, `loading`: lines before it."""

from __future__ import annotations

import re
from typing import TypeAlias

import transformers
from transformers import PreTrainedModel

import specdec
from specdec.heads import registry
from specdec.proposers.base import Proposer
from specdec.proposers.draft_heads.block import BlockProposer
from specdec.proposers.draft_heads.eagle3 import Eagle3Proposer
from specdec.proposers.draft_models.draft_model import DraftModelProposer
from specdec.proposers.lookup.base import Lookup
from specdec.proposers.lookup.suffix import SuffixProposer
from specdec.utils.choices import WITH_NGRAMS

Given: TypeAlias = Proposer | PreTrainedModel | str


def code_of(part: Proposer, given: Given, target: PreTrainedModel, shape: str = "") -> str:
    """Return code of a proposer: of the one given, or of a part of it, in the given or in another shape.

    It uses the names and paths that the user gave. What was given as an object is called `proposer`.

    Args:
        part: what drafts: the proposer, or the lookup or the other part of a hybrid.
        given: what the user gave.
        target: the target, called `model` in the code.
        shape: arguments that change the shape of drafts, such as "branching=(2, 1)".
    """
    if not isinstance(given, str):
        return _code_of_object(part, given, shape)
    if isinstance(part, Lookup):
        return '"suffix"' if isinstance(part, SuffixProposer) else '"ngram"'
    kind, _, argument = given.removeprefix(WITH_NGRAMS).partition(":")
    if not argument and isinstance(part, (Eagle3Proposer, BlockProposer)):
        head: registry.Kind = "eagle3" if isinstance(part, Eagle3Proposer) else "dflash"
        kind, argument = head, registry.find(target, head) if shape else ""
    if not shape:
        kind = "mtp" if kind == "auto" else kind
        return f'"{kind}:{argument}"' if argument else f'"{kind}"'
    source = argument if kind == "exit" else f'"{argument}"' if argument else ""
    like = "like=model" if isinstance(part, DraftModelProposer) else ""  # the same device and number format
    return f"{type(part).__name__}({', '.join(filter(None, (source, like, shape)))})"


def _code_of_object(part: Proposer, given: Given, shape: str) -> str:
    if not isinstance(given, Proposer):
        return f"{type(part).__name__}(proposer, {shape})" if shape else "proposer"
    place = next((name for name in ("ngram", "other") if getattr(given, name, None) is part), "")
    return ".".join(filter(None, ("proposer", place, f"shaped({shape})" if shape else "")))


def imports(code: str) -> str:
    """Return the import of the names of specdec that code uses.

    Examples:
        >>> imports('SpeculativeGenerator(model, NgramProposer(4))')
        'from specdec import NgramProposer, SpeculativeGenerator'
    """
    used = {*re.findall(r"\b[A-Z]\w+(?=\()", code)} & {*specdec.__all__}
    return f"from specdec import {', '.join(sorted(used))}"


def loading(target: PreTrainedModel) -> tuple[str, ...]:
    """Return lines of code that load the target as `model`; none if it was not loaded from anywhere."""
    kind, place = type(target).__name__, str(getattr(target.config, "_name_or_path", "") or "")
    if not place or not hasattr(transformers, kind):
        return ()
    dtype = str(target.dtype).removeprefix("torch.")
    return f"from transformers import {kind}", f'model = {kind}.from_pretrained("{place}", dtype="{dtype}")'
