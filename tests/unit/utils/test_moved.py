"""Old places of public names: they work, and say where the name is now."""

import importlib
import subprocess
import sys
import warnings

import pytest
import torch

import specdec
from specdec.utils.moved import MOVED, RENAMED
from tests.support import tiny

PLACES = [(module, name, new) for module, names in MOVED.items() for name, new in names.items()]


@pytest.mark.parametrize(("module", "name", "new"), PLACES, ids=lambda value: str(value).removeprefix("specdec."))
def test_an_old_name_is_the_new_one(module, name, new):
    with pytest.warns(DeprecationWarning, match=rf"{module}\.{name} is now {new}\.{name}"):
        found = getattr(importlib.import_module(module), name)
    assert found is getattr(importlib.import_module(new), name)


def deprecations(code):
    """Messages and places of the warnings of `code`, which a file "user.py" holds; and the names that it binds."""
    names = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exec(compile(code, "user.py", "exec"), names)
    ours = [
        warning for warning in caught if warning.category is DeprecationWarning and " is now " in str(warning.message)
    ]
    return [(str(warning.message).split(" is now ")[0], warning.filename) for warning in ours], names


@pytest.mark.parametrize("module", MOVED)
def test_an_old_module_lists_its_names(module):
    found, names = deprecations(f"from {module} import *")
    assert {name for name in names if not name.startswith("__")} == {*MOVED[module]}
    assert sorted(found) == [(f"{module}.{name}", "user.py") for name in sorted(MOVED[module])]
    assert {*MOVED[module], "__name__"} <= {*dir(importlib.import_module(module))}


@pytest.mark.parametrize("old", RENAMED)
def test_a_renamed_class_is_the_new_one(old):
    with pytest.warns(DeprecationWarning, match=f"specdec.{old} is now specdec.{RENAMED[old]}"):
        assert getattr(specdec, old) is getattr(specdec, RENAMED[old])


@pytest.mark.parametrize("form", ["from {} import {}", "import {0}; {0}.{1}", "import {0}; hasattr({0}, '{1}')"])
@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("specdec.eagle3", "load"),
        ("specdec.training", "train"),
        ("specdec.proposers", "Proposer"),
        ("specdec", "Round"),
    ],
)
def test_an_access_warns_once_at_the_callers_line(module, name, form):
    """The import system looks a package's names up with `hasattr` before the import does."""
    importlib.import_module(module)
    code = form.format(module, name)
    assert deprecations(code)[0] == [(f"{module}.{name}", "user.py")]
    assert deprecations(code)[0] == [(f"{module}.{name}", "user.py")]  # the next access as well


@pytest.mark.slow
def test_an_import_that_raises_on_warnings_says_so():
    code = "import warnings; warnings.simplefilter('error', DeprecationWarning); from specdec.training import train"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "DeprecationWarning: specdec.training.train is now specdec.training.run.train" in done.stderr


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
