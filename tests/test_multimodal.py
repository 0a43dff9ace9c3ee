"""Texts alone, written by models that also take pictures: their positions come in several planes (M-RoPE)."""

import pytest
import torch
from transformers import AutoModelForImageTextToText, PreTrainedModel

from specdec import SpeculativeGenerator
from specdec.runner import forward_parameters
from tests import families, tiny

FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "llava", "mistral3", "qwen3_5"]
ARGUMENTS = {"do_sample": False, "max_new_tokens": 16}


def tiny_model(name: str) -> PreTrainedModel:
    config = families.tiny_config(name)
    text = config.get_text_config(decoder=True)
    rope = text.rope_parameters
    if "vl" in name or name == "glm4v" or "mrope_section" in rope:  # halves of a head, shared by the planes
        rope["mrope_section"] = [2, 1, 1]
    marks = [
        key for key in vars(config) if key.endswith(("_token_id", "_token_index")) and key[:3] not in ("pad", "eos")
    ]
    for number, key in enumerate(marks):
        setattr(config, key, 90 + number)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).float().eval()
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = tiny.PAD, None
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() >= 2:
                weight.mul_(4)
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_texts_alone(name):
    model = tiny_model(name)
    for lengths in ((9,), (9, 4)):
        inputs = tiny.prompts(*lengths)
        if "mm_token_type_ids" in forward_parameters(model):
            inputs |= {"mm_token_type_ids": torch.zeros_like(inputs["input_ids"])}  # as its processor says: no picture
        plain = model.generate(**inputs, **ARGUMENTS)
        spec = SpeculativeGenerator(model, tiny.Garbage(answer=plain), draft_length=4)
        with tiny.specdec_warnings() as messages:
            assert spec.generate(**inputs, **ARGUMENTS).tolist() == plain.tolist()
        assert spec.report.num_plain_calls == 0
        assert not messages
