"""The GPU's 8-bit linear layer: in Triton's interpreter, or on a GPU where there is one."""

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from specdec.models import int8_linear as wiring
from specdec.models.int8_linear import GpuInt8Linear, Int8Linear, int8_pays, with_int8_linears
from specdec.models.kernels import int8_linear as kernels
from specdec.models.kernels.int8_linear import ROWS, Tiles, int8_linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]  # the interpreter rounds bfloat16 wrongly


def apart(ours, right):
    """The largest difference, in standard deviations."""
    return float((ours.double() - right).abs().max() / right.std())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("tiles", [None, Tiles(16, 64, 4, 2)], ids=["in use", "small"])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 40, 96), (1, 64, 1024), (3, 40, 96), (16, 80, 512)])
def test_the_product_is_that_of_the_scaled_weights(rows, outputs, inputs, tiles, biased, dtype):
    x = torch.randn(rows, inputs).to(DEVICE, dtype)
    weights = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8).to(DEVICE)
    scale = (torch.rand(outputs) + 0.1).to(DEVICE, torch.bfloat16)
    bias = torch.randn(outputs).to(DEVICE, dtype) * 100 if biased else None
    right = x.double() @ (weights.double() * scale.double()[:, None]).T
    right = right + bias.double() if biased else right
    ours = int8_linear(x, weights, scale, bias, tiles)
    assert ours.dtype == dtype
    assert apart(ours, right) < (4e-3 if dtype == torch.float16 else 2e-2)


def test_rows_that_do_not_lie_one_after_the_other():
    x = torch.randn(3, 2, 64, dtype=torch.float16).to(DEVICE)[:, 0]
    weights = torch.randint(-127, 128, (40, 64), dtype=torch.int8).to(DEVICE)
    scale = torch.ones(40, device=DEVICE)
    assert apart(int8_linear(x, weights, scale), x.double() @ weights.double().T) < 4e-3


def test_a_layer_reads_them_for_few_rows_only(monkeypatch):
    layer = nn.Linear(64, 48).to(DEVICE, torch.float16).requires_grad_(False)
    fast, asked = GpuInt8Linear.of(layer), []
    monkeypatch.setattr(kernels, "int8_linear", lambda *args: asked.append(len(args[0])) or int8_linear(*args))
    monkeypatch.setattr(wiring, "NARROW", 48)
    for shape in ((1, 1), (2, 3), (2, ROWS), (1, 0)):
        x = torch.randn(*shape, 64, dtype=torch.float16).to(DEVICE)
        ours, own = fast(x), layer(x)
        assert ours.shape == own.shape
        torch.testing.assert_close(ours, own, atol=0.03, rtol=0)
    assert asked == [1, 6]
    monkeypatch.setattr(wiring, "NARROW", 49)
    fast(x[:1, :0].new_zeros(1, 3, 64))
    assert asked == [1, 6]


def test_heads_get_them_on_a_gpu():
    model = nn.Sequential(nn.Linear(4096, 4096, device=DEVICE, dtype=torch.bfloat16))
    assert not int8_pays(nn.Sequential(nn.Linear(64, 64)))
    if DEVICE == "cpu":
        assert type(with_int8_linears(model)[0]) is Int8Linear
        return
    assert int8_pays(model)
    assert type(with_int8_linears(model)[0]) is GpuInt8Linear
