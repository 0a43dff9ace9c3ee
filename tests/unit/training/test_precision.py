"""In which number format heads are trained."""

from copy import deepcopy

import pytest
import torch

from specdec.training import precision
from tests.support import tiny

CPU = torch.device("cpu")


@pytest.mark.parametrize("emulated", [True, False])
def test_bfloat16_where_products_are_faster_in_it(emulated, monkeypatch):
    seconds = {torch.float32: 1.0, torch.bfloat16: 6.0 if emulated else 0.4}
    monkeypatch.setattr(precision, "_seconds", seconds.__getitem__)
    target = deepcopy(tiny.model("llama")).to(torch.bfloat16)
    weights = {name: tensor.float() for name, tensor in target.state_dict().items()}
    assert precision.bfloat16_is_faster(CPU) is not emulated
    read = precision.in_fastest_dtype(target)
    assert read.dtype == (torch.float32 if emulated else torch.bfloat16)
    assert all(torch.equal(tensor.float(), weights[name]) for name, tensor in read.state_dict().items())


def test_other_formats_stay(monkeypatch):
    monkeypatch.setattr(precision, "_seconds", {torch.float32: 1.0, torch.bfloat16: 6.0}.__getitem__)
    assert precision.in_fastest_dtype(deepcopy(tiny.model("llama")).to(torch.float16)).dtype == torch.float16


def test_quantised_targets_stay(monkeypatch):
    """transformers refuses to convert them."""
    monkeypatch.setattr(precision, "_seconds", {torch.float32: 1.0, torch.bfloat16: 6.0}.__getitem__)
    target = deepcopy(tiny.model("llama")).to(torch.bfloat16)
    target.hf_quantizer = object()
    assert precision.in_fastest_dtype(target).dtype == torch.bfloat16


def test_the_clock_is_asked():
    assert all(precision._seconds(dtype) > 0 for dtype in (torch.float32, torch.bfloat16, torch.float64))


def test_numbers_that_are_slow_are_0():
    slow = torch.tensor([1e-39, 1e-37])
    with precision.without_denormals():
        assert (slow * 1.0).tolist() == [0.0, pytest.approx(1e-37)]
    assert bool((slow * 1.0 > 0).all())


@pytest.fixture
def fresh():
    precision._timings.cache_clear()
    yield
    precision._timings.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_another_program_does_not_decide(monkeypatch):
    """Of a close race, where most tries were disturbed, the best counts; a clear one is over soon."""
    taken = {torch.float32: [10.0] * 20, torch.bfloat16: [12.0] * 9 + [1.5] + [12.0] * 10}
    asked = []

    def product(dtype):
        asked.append(dtype)
        return taken[dtype][asked.count(dtype) - 1]

    monkeypatch.setattr(precision, "_product", product)
    assert precision.bfloat16_is_faster(CPU)
    assert len(asked) == 20
    precision._timings.cache_clear()
    asked.clear()
    taken[torch.bfloat16] = [220.0] * 20
    assert not precision.bfloat16_is_faster(CPU)
    assert len(asked) == 2 * precision.TRIES
