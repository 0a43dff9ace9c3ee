"""Examples in docstrings: doctests run, and code blocks are Python that imports what exists."""

import ast
import doctest
import re
from importlib import import_module
from pathlib import Path

import pytest

import specdec

PACKAGE = Path(specdec.__file__).resolve().parent
MODULES = [
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(PACKAGE.rglob("*.py"))
]
TEXTS = {name: (PACKAGE.parent / (name.replace(".", "/") + ".py")) for name in MODULES}
TEXTS = {name: path.read_text(encoding="utf-8") for name, path in TEXTS.items() if path.is_file()}
BLOCK = re.compile(r"^( +)```python\n(.*?)^\1```", re.M | re.S)


@pytest.mark.parametrize("name", [name for name, text in TEXTS.items() if re.search(r"^\s+>>> ", text, re.M)])
def test_doctests_run(name):
    assert doctest.testmod(import_module(name)).failed == 0


@pytest.mark.parametrize("name", [name for name, text in TEXTS.items() if BLOCK.search(text)])
def test_code_blocks_are_python(name):
    for indent, block in BLOCK.findall(TEXTS[name]):
        code = "\n".join(line.removeprefix(indent) for line in block.splitlines())
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in ("specdec", "transformers"):
                assert all(hasattr(import_module(node.module), alias.name) for alias in node.names)


def test_public_names_have_examples():
    for name in specdec.__all__:
        text = getattr(specdec, name).__doc__
        assert re.search(r"^\s*(>>> |```python)", text, re.M), name
