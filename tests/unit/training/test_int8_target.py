"""States in 8 bits: close to the target's own, on a view of it."""

import pytest
import torch
from torch import nn

from specdec.training.teacher.int8_target import ByteLinear, with_int8_decoder
from tests.support import eagle3, tiny
from tests.support.training import run


def off(found, wanted):
    """Of rows, how far each is off."""
    return (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_close(bias, dtype):
    torch.manual_seed(0)
    layer, x = nn.Linear(96, 40, bias=bias).to(dtype), torch.randn(2, 33, 96).to(dtype)
    rounded = ByteLinear.of(layer)
    assert rounded(x).dtype == dtype
    assert float(off(rounded(x).float(), layer(x).float()).max()) < 0.02
    x[..., 3] *= 300  # all others are rounded to nothing
    layer.weight[:, 3] = 0
    assert float(off(rounded(x).float(), layer(x).float()).median()) > 0.3
    rounded = ByteLinear.of(layer)
    rounded.twice = True
    assert float(off(rounded(x).float(), layer(x).float()).max()) < 0.02


@torch.no_grad()
def test_a_target_reads_in_8_bits():
    """What needs rounding twice is found by reading; the target itself stays as it was."""
    target, ids = tiny.model("llama", num_hidden_layers=3), tiny.prompts(40)["input_ids"]
    uneven = target.model.layers[1].mlp
    uneven.up_proj.weight[5] *= 1000
    uneven.down_proj.weight[:, 5] = 0
    wanted = eagle3.states_of(target, ids, (1, 2, -1))
    view = with_int8_decoder(target, ids[0])
    assert float(off(eagle3.states_of(view, ids, (1, 2, -1)), wanted).median()) < 0.1
    layers = {name: layer for name, layer in view.named_modules() if isinstance(layer, nn.Linear)}
    assert [name for name, layer in layers.items() if type(layer) is not ByteLinear] == ["lm_head"]
    assert layers["model.layers.1.mlp.down_proj"].twice
    assert not layers["model.layers.0.mlp.gate_proj"].twice
    for layer in target.modules():
        assert type(layer) is not ByteLinear
        assert not layer._forward_hooks
    assert torch.equal(eagle3.states_of(target, ids, (1, 2, -1)), wanted)

    layers["model.layers.1.mlp.down_proj"].twice = False  # what it is for
    assert float(off(eagle3.states_of(view, ids, (-1,)), wanted[..., -32:]).median()) > 0.1


@pytest.mark.slow
def test_a_head_is_trained_on_them(files, tmp_path):
    result = run(files, tmp_path / "out", "--cache-states", "--rounded-states")
    assert result.exit_code == 0, result.output
    result = run(files, tmp_path / "out", "--cache-states")
    assert result.exit_code == 2
    assert "rounded_states" in result.output
    result = run(files, tmp_path / "other", "--rounded-states")
    assert result.exit_code == 2
    assert "give --cache-states too" in result.output


@torch.no_grad()
def test_products_are_the_same_without_torchs_internal_operator(monkeypatch):
    torch.manual_seed(0)
    layer, x = ByteLinear.of(nn.Linear(64, 48)), torch.randn(17, 64)
    expected = layer(x)
    monkeypatch.delattr(torch, "_int_mm")
    torch.testing.assert_close(layer(x), expected)
