"""In which number format heads are trained."""

from copy import deepcopy

import pytest
import torch

from specdec.training import precision
from tests import tiny

CPU = torch.device("cpu")


@pytest.mark.parametrize("emulated", [True, False])
def test_bfloat16_where_products_are_faster_in_it(emulated, monkeypatch):
    seconds = {torch.float32: 1.0, torch.bfloat16: 6.0 if emulated else 0.4}
    monkeypatch.setattr(precision, "_seconds", seconds.__getitem__)
    target = deepcopy(tiny.model("llama")).to(torch.bfloat16)
    weights = {name: tensor.float() for name, tensor in target.state_dict().items()}
    assert precision.pays(CPU) is not emulated
    read = precision.as_fast_as_it_reads(target)
    assert read.dtype == (torch.float32 if emulated else torch.bfloat16)
    assert all(torch.equal(tensor.float(), weights[name]) for name, tensor in read.state_dict().items())


def test_other_formats_stay(monkeypatch):
    monkeypatch.setattr(precision, "_seconds", {torch.float32: 1.0, torch.bfloat16: 6.0}.__getitem__)
    assert precision.as_fast_as_it_reads(deepcopy(tiny.model("llama")).to(torch.float16)).dtype == torch.float16


def test_the_clock_is_asked():
    assert precision._seconds(torch.float32) > 0
