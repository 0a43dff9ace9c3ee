"""Each choice is one table: names, words, builders and rules agree, and an unknown name raises."""

from typing import get_args

import pytest

from specdec import NgramProposer, SpeculativeGenerator
from specdec.engine.rules import REJECTION_RULES
from specdec.proposers.factory import BUILDERS, as_proposer
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


@pytest.mark.parametrize("rule", ["blok", "", None])
def test_an_unknown_rule_raises_whatever_drafts(rule):
    with pytest.raises(ValueError, match="rule must be"):
        SpeculativeGenerator(tiny.model("llama"), NgramProposer(), rule=rule)
