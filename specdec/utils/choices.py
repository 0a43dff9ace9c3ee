"""Options that users choose by name: proposers, verification rules, dtypes, head layouts.

Imports nothing slow, so that the command line can check its options before it loads torch.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Any, Literal, get_args

# names without an argument; others hold a path or hub id ("draft:PATH_OR_ID")
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
    r"ngram|suffix|auto|(ngram\+)?(eagle3|dflash|mtp|(draft|eagle3|mtp|dflash|medusa|hydra):.+|exit:\d{1,6})"
)
NEED_A_PATH = dict.fromkeys(("draft", "medusa", "hydra"), "PATH_OR_ID") | {"exit": "LAYERS"}
PROPOSERS_IN_WORDS = (
    '"ngram", "suffix", "draft:PATH_OR_ID", "eagle3" or "dflash" (a known head), "eagle3:PATH_OR_ID", '
    '"dflash:PATH_OR_ID", "medusa:PATH_OR_ID", "hydra:PATH_OR_ID", "mtp" (the model\'s own MTP layers), '
    '"mtp:PATH_OR_ID", "exit:LAYERS", "ngram+" before any of these except the first two, or "auto"'
)


def check_choice(what: str, chosen: Any, choices: Any) -> None:
    """Raise ValueError unless `chosen` is one of the values of the `Literal` type `choices`.

    Args:
        what: name of the option, for the message.
        chosen: the value to check.
        choices: a `Literal` type.

    Examples:
        >>> check_choice("rule", "block", RuleName)
        >>> check_choice("rule", "blocks", RuleName)
        Traceback (most recent call last):
        ...
        ValueError: rule must be one of 'coupled', 'block', 'token', 'typical', got 'blocks'
    """
    if chosen not in get_args(choices):
        raise ValueError(f"{what} must be one of {', '.join(map(repr, get_args(choices)))}, got {chosen!r}")


def check_name(proposer: str) -> None:
    """Raise ValueError, with a suggestion where there is one, unless `proposer` is a valid short form.

    Examples:
        >>> check_name("ngram+eagle3")
        >>> check_name("eagle")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: did you mean "eagle3"? proposer must be "ngram", ...
    """
    first, plus, last = proposer.rpartition("+")
    if plus and last == "ngram" and PROPOSERS.fullmatch(WITH_NGRAMS + first):
        raise ValueError(f'n-grams come first: "{WITH_NGRAMS}{first}", got {proposer!r}')
    if not PROPOSERS.fullmatch(proposer):
        raise ValueError(f"{_meant(proposer)}proposer must be {PROPOSERS_IN_WORDS}, got {proposer!r}")


def _meant(proposer: str) -> str:
    """A suggestion for a misspelt or incomplete short form; empty if there is none."""
    if proposer in (WITH_NGRAMS + "ngram", WITH_NGRAMS + "suffix"):
        last = proposer.removeprefix(WITH_NGRAMS)
        return f'both parts of {proposer!r} look up text, one of them is enough ("{last}"): '
    kind, colon, source = proposer.partition(":")
    plain = kind.removeprefix(WITH_NGRAMS)
    if plain in NEED_A_PATH:
        return f'"{kind}" needs an argument, "{kind}:{NEED_A_PATH[plain]}": '
    close = get_close_matches(kind.lower(), [*get_args(ProposerName), *NEED_A_PATH], n=1, cutoff=0.7)
    if close:
        return f'did you mean "{close[0]}{colon}{source}"? '
    if "/" in proposer or "\\" in proposer:
        return f'a path needs a prefix for its kind, "draft:{proposer}" (a model) or "eagle3:{proposer}" (a head): '
    return ""
