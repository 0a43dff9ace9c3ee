"""What users choose among by name: what drafts, rules, number formats, layouts of heads.

Owns the names and whether a string is one. Imports nothing that takes time: commands check them before torch is there.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Any, Literal, get_args

# others hold a path or hub id
ProposerName = Literal[
    "auto", "ngram", "suffix", "eagle3", "dflash", "mtp", "ngram+eagle3", "ngram+dflash", "ngram+mtp"
]
RuleName = Literal["coupled", "block", "token", "typical"]
OnUnsupported = Literal["plain", "error"]
NumberFormat = Literal["auto", "bfloat16", "float16", "float32"]
HeadLayout = Literal["sglang", "speculators", "int8"]
LossName = Literal["ce", "lk", "ce+lk", "tv"]
OptimizerName = Literal["adamw", "muon"]
HeadKind = Literal["eagle3", "dflash", "dspark", "mtp"]
Sharding = Literal["none", "devices", "tp", "fsdp"]
Tracker = Literal["none", "tensorboard", "wandb"]

COUPLED: RuleName = "coupled"
WITH_NGRAMS = "ngram+"
PROPOSERS = re.compile(
    r"ngram|suffix|auto|(ngram\+)?(eagle3|dflash|mtp|(draft|eagle3|mtp|dflash|medusa|hydra):.+|exit:\d+)"
)
NEED_A_PATH = dict.fromkeys(("draft", "medusa", "hydra"), "PATH_OR_ID") | {"exit": "LAYERS"}
PROPOSERS_IN_WORDS = (
    '"ngram", "suffix", "draft:PATH_OR_ID", "eagle3" or "dflash" (a known head), "eagle3:PATH_OR_ID", '
    '"dflash:PATH_OR_ID", "medusa:PATH_OR_ID", "hydra:PATH_OR_ID", "mtp" (the model\'s own MTP layers), '
    '"mtp:PATH_OR_ID", "exit:LAYERS", one of these but the first two behind "ngram+", or "auto"'
)


def check_choice(what: str, chosen: Any, choices: Any) -> None:
    """Raise ValueError unless it is one of a `Literal`'s values."""
    if chosen not in get_args(choices):
        raise ValueError(f"{what} must be one of {', '.join(map(repr, get_args(choices)))}, got {chosen!r}")


def check_name(proposer: str) -> None:
    """Raise ValueError unless it is one of the short forms."""
    first, plus, last = proposer.rpartition("+")
    if plus and last == "ngram" and PROPOSERS.fullmatch(WITH_NGRAMS + first):
        raise ValueError(f'n-grams come first: "{WITH_NGRAMS}{first}", got {proposer!r}')
    if PROPOSERS.fullmatch(proposer):
        return
    names = [*get_args(ProposerName), *NEED_A_PATH]
    close = get_close_matches(proposer.lower(), names, n=1, cutoff=0.7)
    meant = f' Did you mean "{close[0]}"?' if close else ""
    if proposer in NEED_A_PATH:
        meant = f' "{proposer}" needs to know which: "{proposer}:{NEED_A_PATH[proposer]}".'
    raise ValueError(f"proposer must be {PROPOSERS_IN_WORDS}, got {proposer!r}.{meant}")
