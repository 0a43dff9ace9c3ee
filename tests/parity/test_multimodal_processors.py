"""Pictures as users give them: through transformers' own processors, by `apply_chat_template` and by calling them."""

import pytest
import torch
from transformers.models.smolvlm import processing_smolvlm

from specdec import NgramProposer, SpeculativeGenerator
from tests.support import pictured, processed, tiny
from tests.support.diagonal import diagonal

SAID = ("what is in this picture?", "is it the same?")
SHAPES = ((70, 40), (50, 90))
WAYS = {"T = 0": {"do_sample": False}, "T = 1": {"do_sample": True, "top_k": 0}}


@pytest.fixture(autouse=True)
def smolvlm_without_films(monkeypatch):
    """Its processor asks for a package that spells numbers, for films alone."""
    if processing_smolvlm.num2words is None:
        monkeypatch.setattr(processing_smolvlm, "num2words", str)


@pytest.mark.parametrize(("name", "rows", "way"), diagonal(processed.FAMILIES, [2, 1], WAYS.keys()))
def test_a_chat_with_pictures(name, rows, way):
    model = pictured.model(name)
    processor = processed.processor(name, model.config)
    inputs = _chats(processor, rows)
    assert len(inputs["input_ids"]) == rows
    assert inputs["attention_mask"].bool().all() == (rows == 1)
    plain = _written(model, inputs, WAYS[way])
    for proposer in (NgramProposer(), tiny.Garbage(answer=plain)):
        spec = SpeculativeGenerator(model, proposer, draft_length=4, on_unsupported="error")
        assert _written(spec, inputs, WAYS[way]).tolist() == plain.tolist()
    assert spec.report.num_accepted_tokens > 3


@pytest.mark.parametrize("name", processed.FAMILIES)
def test_the_tiny_models_look_at_them(name):
    model = pictured.model(name)
    processor = processed.processor(name, model.config)
    one, other = (_written(model, _chats(processor, 1, seed), WAYS["T = 0"]) for seed in (0, 1))
    assert one.tolist() != other.tolist()


@pytest.mark.parametrize(("name", "way"), diagonal(processed.FAMILIES, ["T = 1", "T = 0"]))
def test_a_processor_that_is_called(name, way):
    """Two pictures in the first row, one in the second."""
    model = pictured.model(name)
    processor = processed.processor(name, model.config)
    mark = processed.mark(processor)
    texts = [f"{mark}{SAID[0]}{mark}{SAID[1]}", f"so:{mark}"]
    shown = [[processed.picture(*shape) for shape in SHAPES], [processed.picture(30, 30, seed=2)]]
    nested = name in processed.BY_ROW
    inputs = processor(
        images=shown if nested else [each for row in shown for each in row],
        text=texts,
        padding=True,
        return_tensors="pt",
    )
    plain = _written(model, inputs, WAYS[way])
    spec = SpeculativeGenerator(model, tiny.Garbage(answer=plain), draft_length=4, on_unsupported="error")
    assert _written(spec, inputs, WAYS[way]).tolist() == plain.tolist()
    assert spec.report.num_accepted_tokens > 3


def _chats(processor, rows, seed=0):
    """The first shows its picture before what it says, the second after it."""
    chats = []
    for row in range(rows):
        shown = {"type": "image", "image": processed.picture(*SHAPES[row], seed=10 * seed + row)}
        said = {"type": "text", "text": SAID[row]}
        chats.append([{"role": "user", "content": [said, shown] if row else [shown, said]}])
    return processor.apply_chat_template(
        chats,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs={"padding": True},
    )


def _written(by, inputs, arguments):
    torch.manual_seed(3)
    return by.generate(**inputs, **arguments, max_new_tokens=16)
