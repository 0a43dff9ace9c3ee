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
StepWeights = Literal["decay", "d-pace"]
OptimizerName = Literal["adamw", "muon"]
HeadKind = Literal["eagle3", "dflash", "jetspec", "dspark", "mtp"]
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
        pattern_words: description of the pattern, for messages.
        after_ngrams: True if "ngram+" may stand before the name.
    """

    description: str = ""
    argument: str = ""
    needs_argument: bool = False
    pattern: str = ".+"
    pattern_words: str = "a path or hub id on one line"
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
    "exit": ProposerKind(
        argument="LAYERS",
        needs_argument=True,
        pattern=r"\d{1,6}",
        pattern_words="a number of layers of at most 6 digits",
    ),
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
    if not any(isinstance(chosen, type(choice)) and chosen == choice for choice in get_args(choices)):  # 1 == True
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
        raise ValueError(f"{_correction(proposer)}proposer must be {PROPOSERS_IN_WORDS}, got {proposer!r}")


def _correction(proposer: str) -> str:
    """The fault of an invalid short form and the string to write instead, as a clause; empty if neither is known."""
    names, colon, argument = proposer.partition(":")
    parts = names.split("+")
    found = [name for part in parts if part for name in _closest(part)]
    if "" in found or not found:
        return _prefix_for_path(proposer)
    lookups = [name for name in found if name in LOOKUPS]
    others = list(dict.fromkeys(name for name in found if name not in LOOKUPS))
    if len(others) > 1:
        forms = " or ".join(f'"{_valid_form(name, argument if name == found[-1] else "", True)}"' for name in others)
        return f"only n-grams can be combined with another proposer, write {forms}: "
    if not others and len(found) > 1:
        enough = next((name for name in lookups if name != "ngram"), "ngram")
        return f'both parts of {proposer!r} look up text, one of them is enough ("{enough}"): '
    kind = PROPOSER_KINDS[name := (others or lookups)[0]]
    form = _valid_form(name, argument, bool(lookups) or len(parts) > 1)
    if [part for part in parts if part in PROPOSER_KINDS] != parts:
        return f'did you mean "{form}"? '
    if name == "auto" and len(parts) > 1:
        return f'"auto" includes n-grams, write "{form}": '
    if len(parts) > 1 and names != WITH_NGRAMS + name:
        return f'only "ngram" can stand before "+", write "{form}": '
    if colon and not kind.argument:
        return f'"{names}" takes no argument, write "{form}": '
    if kind.needs_argument and not argument:
        return f'"{names}" needs an argument, "{form}": '
    if not argument:
        return f"there is no argument after the colon, write {' or '.join(kind.forms(names))}: "
    return f'the argument of "{names}" must be {kind.pattern_words}, write "{form}": '


def _closest(part: str) -> list[str]:
    """The kinds that a part of a short form names, the most similar ones if it is misspelt; [""] if none is similar."""
    if part in PROPOSER_KINDS:
        return [part]
    known = [] if _is_path(part) else [*get_args(ProposerName), *PROPOSER_KINDS]
    return [*get_close_matches(part.lower(), known, n=1, cutoff=0.7), ""][0].split("+")


def _valid_form(name: str, argument: str, with_ngrams: bool) -> str:
    """The short form of a kind with the argument, or with a placeholder where the argument does not suit it."""
    kind = PROPOSER_KINDS[name]
    start = WITH_NGRAMS + name if with_ngrams and kind.after_ngrams else name
    if not kind.argument or not (argument or kind.needs_argument):
        return start
    return f"{start}:{argument if re.fullmatch(kind.pattern, argument) else kind.argument}"


def _prefix_for_path(proposer: str) -> str:
    """The two forms of a path or hub id that was given without its kind; empty if `proposer` is no path."""
    if not _is_path(proposer):
        return ""
    first, plus, path = proposer.partition("+")
    start, path = (WITH_NGRAMS, path) if plus and first in LOOKUPS else ("", proposer)
    forms = f'"{start}draft:{path}" (a model) or "{start}eagle3:{path}" (a head)'
    return f"a path needs a prefix for its kind, {forms}: "


def _is_path(text: str) -> bool:
    return "/" in text or "\\" in text
