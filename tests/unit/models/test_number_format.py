"""Weights in another number format are those that `from_pretrained(dtype=...)` gives, buffers included."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from specdec.cli.common import load as load_for_command
from specdec.models.loading import load
from specdec.models.number_format import convert
from tests.support import encoded, tiny


@pytest.fixture
def saved(tmp_path, chat_tokenizer):
    tiny.on_host("gemma3").save_pretrained(tmp_path)
    chat_tokenizer.save_pretrained(tmp_path)
    return str(tmp_path)


def as_loaded(path, dtype):
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)


def assert_same(ours, theirs):
    """Parameters and buffers have the same formats and values."""
    assert any("inv_freq" in name or "embed_positions" in name for name, _ in ours.named_buffers())
    for kind in ("named_parameters", "named_buffers"):
        found, expected = (dict(getattr(model, kind)()) for model in (ours, theirs))
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            assert tensor.dtype == expected[name].dtype, name
            assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_way_to_load_gives_transformers_model(saved, dtype):
    theirs = as_loaded(saved, dtype)
    assert_same(convert(as_loaded(saved, torch.float32), dtype), theirs)
    assert_same(load(saved, like=theirs), theirs)
    assert_same(load_for_command(saved, dtype=str(dtype).removeprefix("torch."), device="cpu")[0], theirs)
    assert_same(convert(as_loaded(saved, dtype), dtype), theirs)


def test_tables_that_have_the_format_of_the_weights_get_it(tmp_path):
    """M2M100 adds a table of positions, which is no weight, to embeddings."""
    encoded.model("m2m_100").cpu().save_pretrained(tmp_path)
    loaded = {dtype: AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=dtype) for dtype in ("float32", "bfloat16")}
    assert_same(convert(loaded["float32"], torch.bfloat16), loaded["bfloat16"])


def test_weights_that_need_float32_keep_it(saved):
    model = as_loaded(saved, torch.float32)
    model._keep_in_fp32_modules, model._keep_in_fp32_modules_strict = {"q_norm"}, {"k_norm"}
    convert(model, torch.bfloat16)
    layer = model.model.layers[0].self_attn
    assert [part.weight.dtype for part in (layer.q_norm, layer.k_norm)] == [torch.bfloat16, torch.float32]
    convert(model, torch.float16)
    assert [part.weight.dtype for part in (layer.q_norm, layer.k_norm)] == [torch.float32, torch.float32]
    assert layer.q_proj.weight.dtype == torch.float16


def test_a_quantised_model_stays_as_it_is(saved):
    model = as_loaded(saved, torch.float32)
    model.hf_quantizer = object()
    assert convert(model, torch.bfloat16).dtype == torch.float32
