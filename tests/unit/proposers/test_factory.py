"""Each choice is one table: names, words, builders and rules agree, and an unknown name raises."""

import re
from itertools import product
from typing import get_args

import pytest

from specdec import NgramProposer, SpeculativeGenerator
from specdec.engine.rules import REJECTION_RULES
from specdec.proposers.factory import BUILDERS, as_proposer, as_proposers
from specdec.utils.choices import (
    COUPLED,
    PROPOSER_KINDS,
    PROPOSERS_IN_WORDS,
    WITH_NGRAMS,
    ProposerName,
    RuleName,
    check_name,
    is_proposer_name,
)
from tests.support import tiny


def test_every_kind_has_a_builder_and_words():
    assert BUILDERS.keys() == PROPOSER_KINDS.keys()
    assert all(f'"{name}' in PROPOSERS_IN_WORDS for name in PROPOSER_KINDS)


def test_the_type_lists_the_names_without_an_argument():
    alone = [name for name, kind in PROPOSER_KINDS.items() if not kind.needs_argument]
    after = [WITH_NGRAMS + name for name in alone if PROPOSER_KINDS[name].after_ngrams]
    assert {*get_args(ProposerName)} == {*alone, *after}


def test_every_rule_is_known():
    assert {*REJECTION_RULES, COUPLED} == {*get_args(RuleName)}


@pytest.mark.parametrize("name", [*get_args(ProposerName), "draft:a", "ngram+draft:a/b", "exit:12", "ngram+hydra:a"])
def test_valid_names(name):
    check_name(name)


@pytest.mark.parametrize(
    "name", ["", "x", "draft", "draft:", "exit:a", "ngram:a", "suffix+draft:a", "ngram+ngram", "ngram+auto", "auto:a"]
)
def test_invalid_names(name):
    assert not is_proposer_name(name)
    with pytest.raises(ValueError, match="proposer must be"):
        check_name(name)
    with pytest.raises(ValueError, match="proposer must be"):
        as_proposer(name, tiny.model("llama"))


CORRECTIONS = {
    "mtp:": """there is no argument after the colon, write "mtp" (the model's own MTP layers) or "mtp:PATH_OR_ID": """,
    "ngram+dflash:": 'after the colon, write "ngram+dflash" (a known head) or "ngram+dflash:PATH_OR_ID": ',
    "auto:x": '"auto" takes no argument, write "auto": ',
    "ngram:3": '"ngram" takes no argument, write "ngram": ',
    "suffix:": '"suffix" takes no argument, write "suffix": ',
    "exit": '"exit" needs an argument, "exit:LAYERS": ',
    "exit:": '"exit" needs an argument, "exit:LAYERS": ',
    "exit:abc": 'the argument of "exit" must be a number of layers of at most 6 digits, write "exit:LAYERS": ',
    "exit:\n": 'the argument of "exit" must be a number of layers of at most 6 digits, write "exit:LAYERS": ',
    "ngram+exit:1.5": 'the argument of "ngram+exit" must be a number of layers of at most 6 digits, write "ngram+exit:',
    "draft:\n": 'the argument of "draft" must be a path or hub id on one line, write "draft:PATH_OR_ID": ',
    "suffix+eagle3": 'only "ngram" can stand before "+", write "ngram+eagle3": ',
    "suffix+draft:a": 'only "ngram" can stand before "+", write "ngram+draft:a": ',
    "eagle3+ngram": 'n-grams come first: "ngram+eagle3", got ',
    "eagle3+suffix": 'only "ngram" can stand before "+", write "ngram+eagle3": ',
    "draft+ngram": 'only "ngram" can stand before "+", write "ngram+draft:PATH_OR_ID": ',
    "mtp+ngram:a": 'only "ngram" can stand before "+", write "ngram+mtp:a": ',
    "ngram+ngram+mtp": 'only "ngram" can stand before "+", write "ngram+mtp": ',
    "eagle3+draft:a": 'can be combined with another proposer, write "ngram+eagle3" or "ngram+draft:a": ',
    "auto+mtp": 'can be combined with another proposer, write "auto" or "ngram+mtp": ',
    "ngram+auto": '"auto" includes n-grams, write "auto": ',
    "suffix+ngram": 'one of them is enough ("suffix"): ',
    "ngram+": 'did you mean "ngram"? ',
    "drafts": 'did you mean "draft:PATH_OR_ID"? ',
    "ngrams:3": 'did you mean "ngram"? ',
    "eagle:": 'did you mean "eagle3"? ',
    "exitt:abc": 'did you mean "exit:LAYERS"? ',
    "ngram+drft:a": 'did you mean "ngram+draft:a"? ',
    "n-gram+Eagle3": 'did you mean "ngram+eagle3"? ',
    "a/eagle3": 'a path needs a prefix for its kind, "draft:a/eagle3" (a model) or "eagle3:a/eagle3" (a head): ',
    "suffix+a/b": '"ngram+draft:a/b" (a model) or "ngram+eagle3:a/b" (a head): ',
}


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_message_says_what_is_wrong_and_what_to_write(name):
    with pytest.raises(ValueError, match=re.escape(CORRECTIONS[name])):
        check_name(name)


def test_every_correction_is_a_valid_name():
    """Two parts at most, with any argument: the last string in quotes is the one to write."""
    parts, count = [*PROPOSER_KINDS, "eagel3", ""], 0
    names = [*parts, *("+".join(pair) for pair in product(parts, parts))]
    for name in (name + end for name, end in product(names, ["", ":", ":a", ":a/b", ":4", ":\n", ":a+ngram"])):
        if is_proposer_name(name):
            continue
        with pytest.raises(ValueError, match="proposer must be|n-grams come first") as raised:
            check_name(name)
        quoted = re.findall('"(.+?)"', re.split("proposer must be|, got", str(raised.value))[0])
        if quoted:
            count += 1
            assert is_proposer_name(quoted[-1].replace("LAYERS", "4")), (name, str(raised.value))
        else:
            assert name.partition(":")[0] in ("", "+"), name
    assert count > 500


def test_all_names_are_checked_before_a_proposer_is_built():
    with pytest.raises(ValueError, match="one of them is enough"):
        as_proposers(["draft:/no/such/model", "ngram+suffix"], tiny.model("llama"))


def test_a_class_of_proposers_is_not_an_instance():
    with pytest.raises(ValueError, match=r"got the class NgramProposer: write NgramProposer\(\)"):
        SpeculativeGenerator(tiny.model("llama"), NgramProposer)


@pytest.mark.parametrize("rule", ["blok", "", None])
def test_an_unknown_rule_raises_whatever_drafts(rule):
    with pytest.raises(ValueError, match="rule must be"):
        SpeculativeGenerator(tiny.model("llama"), NgramProposer(), rule=rule)


@pytest.mark.parametrize("value", [1, 0, 1.0, "True", None])
def test_compile_is_a_bool_or_auto(value):
    with pytest.raises(ValueError, match=f"compile must be one of True, False, 'auto', got {value!r}"):
        SpeculativeGenerator(tiny.model("llama"), NgramProposer(), compile=value)
