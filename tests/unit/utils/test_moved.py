"""Old places of public names: they work, and say where the name is now."""

import importlib
import subprocess
import sys

import pytest
import torch

import specdec
from specdec.utils.moved import MOVED
from tests.support import tiny

PLACES = [(module, name, new) for module, names in MOVED.items() for name, new in names.items()]


@pytest.mark.parametrize(("module", "name", "new"), PLACES, ids=lambda value: str(value).removeprefix("specdec."))
def test_an_old_name_is_the_new_one(module, name, new):
    with pytest.warns(DeprecationWarning, match=rf"{module}\.{name} is now {new}\.{name}"):
        found = getattr(importlib.import_module(module), name)
    assert found is getattr(importlib.import_module(new), name)


def test_a_name_that_never_was():
    with pytest.raises(ImportError):
        from specdec.eagle3 import nothing  # noqa: F401
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        specdec.proposers.nothing  # noqa: B018


def test_old_modules_are_found_without_importing_torch():
    code = "import sys, specdec.training, specdec.eagle3; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_names_of_classes_and_methods_that_changed():
    root, tokens = torch.tensor([1]), torch.tensor([[1, 2]])
    with pytest.warns(DeprecationWarning, match="specdec.Round is now specdec.RoundTrace"):
        assert specdec.Round is specdec.RoundTrace
    with pytest.warns(DeprecationWarning, match="confidence_bins"):
        tree = specdec.DraftTree(tokens, torch.tensor([[-1, 0]]), keys=tokens)
    assert tree.confidence_bins is tokens
    assert tree.first(1).confidence_bins.tolist() == [[1]]
    with pytest.warns(DeprecationWarning, match="Elder.follow: Proposer.follow is now Proposer.sync"):

        class Elder(specdec.Proposer):
            def propose(self, context):
                return specdec.DraftTree.root_only(root)

            def follow(self, context):
                return "followed"

    assert Elder().sync(None) == "followed"


def test_a_context_has_its_old_name_for_the_budget():
    found = []

    class Looks(specdec.Proposer):
        def propose(self, context):
            with pytest.warns(DeprecationWarning, match="Context.room is now Context.budget"):
                found.append(context.room == context.budget)
            return specdec.DraftTree.root_only(context.root)

    specdec.SpeculativeGenerator(tiny.model("llama"), Looks()).generate(**tiny.prompts(5), max_new_tokens=3)
    assert found == [True] * len(found) != []
