"""heads/text: prompts and answers in shards, through `specdec regenerate` and back."""

import importlib.util
import json
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "heads/text/shards.py"
pytestmark = pytest.mark.skipif(not FILE.exists(), reason="heads/ is not part of the source package")


@pytest.fixture
def shards(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("shards", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "HERE", tmp_path)
    return module


def prompt(shards, *turns: str) -> dict:
    messages = [{"role": "user", "content": turn} for turn in turns]
    return {"id": shards.identity(messages), "kind": "question", "sources": ["s"], "messages": messages}


def answer(number: int, *said: tuple[str, str], finish: str = "stop") -> str:
    """A line of `specdec regenerate`'s."""
    messages = [{"role": role, "content": content} for role, content in said]
    line = {"id": number, "target": "m", "temperature": 0.0, "finish": finish, "max_new_tokens": 4}
    return json.dumps(line | {"messages": messages}) + "\n"


def test_what_is_packed_is_not_asked_again_and_comes_back_as_texts(shards, tmp_path):
    left, answers = tmp_path / "left.jsonl", tmp_path / "answers.jsonl"
    shards.add(tmp_path / "prompts", [prompt(shards, "a?"), prompt(shards, "b?", "and then?"), prompt(shards, "c?")])
    assert shards.left("some/Model", left) == 3

    cut = answer(1, ("user", "b?"), ("assistant", "B and B"), finish="length")
    answers.write_text(answer(0, ("user", "a?"), ("assistant", "A")) + '{"id": 1, "half a li')
    first = shards.pack("some/Model", left, answers)
    answers.write_text(answer(0, ("user", "a?"), ("assistant", "A")) + cut)
    second = shards.pack("some/Model", left, answers)

    assert [first, second] == [tmp_path / "model/000.jsonl.xz", tmp_path / "model/001.jsonl.xz"]
    assert shards.pack("some/Model", left, answers) is None
    said = [[message["content"] for message in text["messages"]] for text in shards.texts("model")]
    assert said == [["a?", "A"], ["b?", "B and B"]]
    assert [text["finish"] for text in shards.texts("model")] == ["stop", "length"]
    assert shards.left("some/Model", left) == 1
    assert json.loads(left.read_text())["messages"] == [{"role": "user", "content": "c?"}]


def test_prompts_from_elsewhere_are_kept_once_they_are_answered(shards, tmp_path):
    left, answers = tmp_path / "left.jsonl", tmp_path / "answers.jsonl"
    shards.add(tmp_path / "prompts", [prompt(shards, "a?")])
    more = tmp_path / "more.jsonl"
    more.write_text("".join(json.dumps({"prompt": text, "source": "math"}) + "\n" for text in ("x?", "y?")))
    assert shards.left("model", left, more) == 3

    answers.write_text(answer(2, ("user", "y?"), ("assistant", "Y")))
    shards.pack("model", left, answers)

    assert [text["kind"] for text in shards.texts("model")] == ["math"]
    assert sum(1 for _ in shards.entries(tmp_path / "prompts")) == 2  # the file of others' prompts is no part of it
