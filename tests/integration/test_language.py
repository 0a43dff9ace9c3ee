"""Docstrings name their subject first, and identifiers use the field's words."""

import ast
import re
from pathlib import Path

import pytest
from typer.main import get_command

from specdec.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
FILES = [path for folder in ("specdec", "benchmarks", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]
OPENINGS = (
    "Of What Those That These Which Whether Where Whose Who How By As Behind Beside Nothing It They So And But Or Such"
).split()
# Words that were home-made, and what this project says instead. Kept: `watch`, a public method of the generator.
WORDS = {
    "race": "exponential noise", "raced": "coupled_scores", "winner": "chosen token", "gained": "new_tokens",
    "way": "kernel, method", "ways": "kernels, methods", "talk": "layout", "told": "name what it is",
    "watched": "traced", "pictures": "images", "films": "videos", "sounds": "audio", "learnt": "estimates",
    "trial": "probe, autotuner", "trying": "exploring", "bare": "unwrap_model", "entrance": "generate_owner",
    "spread": "is_sharded", "quick": "fast", "twin": "shallow copy", "lent": "borrowed", "sight": "visible_slots",
    "walk": "sequential", "walks": "sequential", "look": "host sync", "looked": "host sync", "looks": "host sync",
}  # fmt: skip


def docstrings(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "name", path.stem), text


def identifiers(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def test_docstrings_name_their_subject():
    found = [
        f"{path.relative_to(ROOT)}: {name}: {text.splitlines()[0]}"
        for path in FILES
        for name, text in docstrings(path)
        if re.split(r"\W", text, maxsplit=1)[0] in OPENINGS
    ]
    assert found == []


def test_identifiers_use_the_fields_words():
    found = set()
    for path in (path for path in FILES if path.is_relative_to(ROOT / "specdec")):
        for name in identifiers(path):
            for word in re.findall(r"[a-z]+|[A-Z][a-z]*", name):
                if word.lower() in WORDS and name != "watch":
                    found.add(f"{path.relative_to(ROOT)}: {name}, use: {WORDS[word.lower()]}")
    assert sorted(found) == []


def options():
    for name, command in get_command(app).commands.items():
        yield pytest.param(command.help or "", id=name)
        for option in command.params:
            if getattr(option, "help", None):
                yield pytest.param(option.help, id=f"{name} {option.name}")


@pytest.mark.parametrize("text", options())
def test_help_texts_begin_with_a_noun_or_a_verb(text):
    assert text.split()[0].strip(",.:").capitalize() not in OPENINGS
