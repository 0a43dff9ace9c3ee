"""Decoder layers of one kind share compiled code; the view computes what the model computes."""

import copy

import pytest
import torch
from torch._dynamo.utils import counters

from specdec.models import static_forward
from specdec.models.compiled_layers import with_compiled_layers
from specdec.models.hidden_states import Taps
from specdec.models.static_forward import SlottedCache, StaticForward
from tests.support import tiny

SLOTS, NODES = 16, 4
KINDS = {"llama": 1, "gemma3": 2, "gpt2": 1, "gpt_neox": 1}  # sliding and full attention


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    counters.clear()


def passed(model, written, taps=None):
    mask = torch.ones(1, 1, NODES, SLOTS, dtype=torch.bool).tril()
    kinds = {*(getattr(model.config, "layer_types", None) or ())}
    masks = dict.fromkeys(kinds, mask) if len(kinds) > 1 else mask
    inputs = {"input_ids": torch.tensor([[1, 2, 3, 4]]), "attention_mask": masks, "position_ids": torch.arange(4)[None]}
    with torch.no_grad():
        return static_forward._pass(model, SlottedCache(written), inputs, taps)


def buffers(model):
    c = model.config
    heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
    shape = 1, heads, SLOTS, getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    slots = torch.arange(NODES)[None]
    return {layer: (torch.zeros(shape), torch.zeros(shape), slots) for layer in range(c.num_hidden_layers)}


@pytest.mark.parametrize("name", KINDS)
def test_layers_of_a_kind_share_code(name):
    model = tiny.model(name, num_hidden_layers=7) if name == "gemma3" else tiny.model(name, num_hidden_layers=4)
    taps = Taps(model, (1, 2))
    view = with_compiled_layers(model, "eager")
    right, ours = buffers(model), buffers(model)
    expected = passed(model, right, taps)
    for _ in range(2):
        for got, wanted in zip(passed(view, ours, taps), expected, strict=True):
            assert torch.equal(got, wanted)
    assert counters["stats"]["unique_graphs"] == KINDS[name]
    for layer in right:  # each layer has written to its own buffers
        assert torch.equal(ours[layer][0], right[layer][0])


def test_layers_that_differ_in_a_hook_do_not_share_code():
    """Hooks within a layer are compiled, and compiled code does not check them."""
    model = copy.deepcopy(tiny.model("llama", num_hidden_layers=3))
    for layer, factor in ((0, 2), (1, 3)):
        model.model.layers[layer].mlp.register_forward_hook(lambda module, args, output, by=factor: by * output)
    view = with_compiled_layers(model, "eager")
    assert torch.equal(passed(view, buffers(model))[0], passed(model, buffers(model))[0])
    assert counters["stats"]["unique_graphs"] == 3


def test_layers_that_differ_in_a_setting_do_not_share_code():
    model = copy.deepcopy(tiny.model("llama", num_hidden_layers=4))
    model.model.layers[2].self_attn.scaling *= 2
    view = with_compiled_layers(model, "eager")
    assert torch.equal(passed(view, buffers(model))[0], passed(model, buffers(model))[0])
    assert counters["stats"]["unique_graphs"] == 2


def test_a_model_that_has_given_attention_weights_is_compiled():
    """Transformers leaves hooks on its attention modules."""
    model = copy.deepcopy(tiny.model("llama", num_hidden_layers=4))
    model.set_attn_implementation("eager")
    model(torch.tensor([[1, 2]]), output_attentions=True)
    model.set_attn_implementation("sdpa")
    assert model.model.layers[0].self_attn._forward_hooks
    view = with_compiled_layers(model, "eager")
    assert torch.equal(passed(view, buffers(model))[0], passed(model, buffers(model))[0])
    assert counters["stats"]["unique_graphs"] == 1
    assert model.model.layers[0].self_attn._forward_hooks


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_model_whose_layers_are_not_found_is_not_compiled(device, monkeypatch):
    def missing(model):
        raise ValueError("cannot find the layers")

    monkeypatch.setattr(static_forward, "decoder_layers", missing)
    monkeypatch.setattr(static_forward, "device_of", lambda model: torch.device(device))
    with tiny.specdec_warnings() as warned:
        forward = StaticForward(tiny.model("llama"))
    assert len(warned) == 1
    assert "cannot find the layers" in warned[0]
    assert bool(forward.refused) == (device == "cpu")
    assert forward.refused or not forward._compiles
    assert forward.compiled  # as asked for: no session makes another one
