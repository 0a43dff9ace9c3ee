"""Weights in another number format are those that `from_pretrained(dtype=...)` gives, buffers included."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec.cli.common import load as load_for_command
from specdec.models.loading import load
from specdec.models.number_format import convert
from tests.support import tiny


@pytest.fixture
def saved(tmp_path, chat_tokenizer):
    tiny.on_host("gemma3").save_pretrained(tmp_path)
    chat_tokenizer.save_pretrained(tmp_path)
    return str(tmp_path)


def as_loaded(path, dtype):
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)


def assert_same(ours, theirs):
    """Parameters are the same, and buffers at least as exact: Gemma's scale is rounded where it is used."""
    weights, expected = dict(ours.named_parameters()), dict(theirs.named_parameters())
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())
    assert all(weight.dtype == expected[name].dtype for name, weight in weights.items())
    buffers, expected = dict(ours.named_buffers()), dict(theirs.named_buffers())
    assert any("inv_freq" in name for name in buffers)
    assert buffers.keys() == expected.keys()
    assert all(torch.equal(buffer.to(expected[name].dtype), expected[name]) for name, buffer in buffers.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_way_to_load_gives_transformers_model(saved, dtype):
    theirs = as_loaded(saved, dtype)
    assert_same(convert(as_loaded(saved, torch.float32), dtype), theirs)
    assert_same(load(saved, like=theirs), theirs)
    assert_same(load_for_command(saved, dtype=str(dtype).removeprefix("torch."), device="cpu")[0], theirs)
    assert_same(convert(as_loaded(saved, dtype), dtype), theirs)


def test_weights_that_need_float32_keep_it(saved):
    model = as_loaded(saved, torch.float32)
    model._keep_in_fp32_modules, model._keep_in_fp32_modules_strict = {"q_norm"}, {"k_norm"}
    convert(model, torch.bfloat16)
    layer = model.model.layers[0].self_attn
    assert [part.weight.dtype for part in (layer.q_norm, layer.k_norm)] == [torch.bfloat16, torch.float32]
    convert(model.float(), torch.float16)
    assert [part.weight.dtype for part in (layer.q_norm, layer.k_norm)] == [torch.float32, torch.float32]
    assert layer.q_proj.weight.dtype == torch.float16


def test_a_quantised_model_stays_as_it_is(saved):
    model = as_loaded(saved, torch.float32)
    model.hf_quantizer = object()
    assert convert(model, torch.bfloat16).dtype == torch.float32
