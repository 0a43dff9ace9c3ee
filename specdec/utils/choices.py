"""Options that users choose by name: proposers, verification rules, dtypes, head layouts.

Imports nothing slow, so that the command line can check its options before it loads torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
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


@dataclass(frozen=True)
class ProposerKind:
    """A kind of proposer, as users name it: `"eagle3"`, or with an argument `"eagle3:PATH_OR_ID"`.

    Attributes:
        description: explanation of the name without an argument; empty if the name says it.
        argument: name of the argument after the colon; empty if there is none.
        needs_argument: True if the name alone is not enough.
        pattern: regular expression of the argument.
        after_ngrams: True if "ngram+" may stand before the name.
    """

    description: str = ""
    argument: str = ""
    needs_argument: bool = False
    pattern: str = ".+"
    after_ngrams: bool = True

    def forms(self, name: str) -> list[str]:
        """The short forms of this kind, quoted, for messages."""
        alone = [] if self.needs_argument else [f'"{name}"' + (f" ({self.description})" if self.description else "")]
        return alone + ([f'"{name}:{self.argument}"'] if self.argument else [])


# `proposers.factory.BUILDERS` has a function for each. `ProposerName` lists the names without an argument.
PROPOSER_KINDS = {
    "ngram": ProposerKind(after_ngrams=False),
    "suffix": ProposerKind(after_ngrams=False),
    "draft": ProposerKind(argument="PATH_OR_ID", needs_argument=True),
    "eagle3": ProposerKind("a known head", "PATH_OR_ID"),
    "dflash": ProposerKind("a known head", "PATH_OR_ID"),
    "medusa": ProposerKind(argument="PATH_OR_ID", needs_argument=True),
    "hydra": ProposerKind(argument="PATH_OR_ID", needs_argument=True),
    "mtp": ProposerKind("the model's own MTP layers", "PATH_OR_ID"),
    "exit": ProposerKind(argument="LAYERS", needs_argument=True, pattern=r"\d{1,6}"),
    "auto": ProposerKind(after_ngrams=False),
}
LOOKUPS = tuple(name for name, kind in PROPOSER_KINDS.items() if not kind.after_ngrams and name != "auto")
_FORMS = [form for name, kind in PROPOSER_KINDS.items() if name != "auto" for form in kind.forms(name)]
_NOT_AFTER = " and ".join(f'"{name}"' for name in LOOKUPS)
PROPOSERS_IN_WORDS = f'{", ".join(_FORMS)}, "{WITH_NGRAMS}" before any of these except {_NOT_AFTER}, or "auto"'


def is_proposer_name(proposer: str) -> bool:
    """Return True if `proposer` is a valid short form.

    Examples:
        >>> [is_proposer_name(name) for name in ("ngram+eagle3", "draft:path", "draft", "ngram+suffix")]
        [True, True, False, False]
    """
    name, colon, argument = proposer.removeprefix(WITH_NGRAMS).partition(":")
    kind = PROPOSER_KINDS.get(name)
    if kind is None or (proposer.startswith(WITH_NGRAMS) and not kind.after_ngrams):
        return False
    if not colon:
        return not kind.needs_argument
    return bool(kind.argument) and re.fullmatch(kind.pattern, argument) is not None


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
    if plus and last == "ngram" and is_proposer_name(WITH_NGRAMS + first):
        raise ValueError(f'n-grams come first: "{WITH_NGRAMS}{first}", got {proposer!r}')
    if not is_proposer_name(proposer):
        raise ValueError(f"{_suggestion(proposer)}proposer must be {PROPOSERS_IN_WORDS}, got {proposer!r}")


def _suggestion(proposer: str) -> str:
    """A suggestion for a misspelt or incomplete short form; empty if there is none."""
    if proposer in [WITH_NGRAMS + name for name in LOOKUPS]:
        last = proposer.removeprefix(WITH_NGRAMS)
        return f'both parts of {proposer!r} look up text, one of them is enough ("{last}"): '
    kind, colon, source = proposer.partition(":")
    plain = kind.removeprefix(WITH_NGRAMS)
    if plain in PROPOSER_KINDS and PROPOSER_KINDS[plain].needs_argument:
        return f'"{kind}" needs an argument, "{kind}:{PROPOSER_KINDS[plain].argument}": '
    close = get_close_matches(kind.lower(), [*get_args(ProposerName), *PROPOSER_KINDS], n=1, cutoff=0.7)
    if close:
        return f'did you mean "{close[0]}{colon}{source}"? '
    if "/" in proposer or "\\" in proposer:
        return f'a path needs a prefix for its kind, "draft:{proposer}" (a model) or "eagle3:{proposer}" (a head): '
    return ""
