"""Old places of public names: they work, and say where the name is now."""

import importlib
import subprocess
import sys

import pytest

import specdec
from specdec.utils.moved import MOVED

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
