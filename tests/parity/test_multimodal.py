"""Models that also take pictures: texts alone, whose positions come in several planes (M-RoPE), and with pictures."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec import DraftModelProposer, Eagle3Proposer, NgramProposer, SpeculativeGenerator
from specdec.models.compat import CACHE, cache_in
from specdec.models.introspection import forward_parameters
from tests.support import eagle3, families, pictured, tiny
from tests.support.diagonal import diagonal

TEXTS = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "llava", "mistral3", "qwen3_5"]
ARGUMENTS = {"do_sample": False, "max_new_tokens": 16}
ORDER = torch.arange(13)[None]  # as if a picture were a line of text
PROMPTS = {"one row": (7,), "ragged": (7, 4, 9)}


@pytest.mark.parametrize("name", TEXTS)
def test_texts_alone(name):
    model = pictured.model(name)
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


@pytest.mark.parametrize(("name", "lengths"), diagonal(pictured.FAMILIES, PROMPTS))
def test_pictures(name, lengths):
    model = pictured.model(name)
    for count in (1, 2):
        inputs = pictured.prompts(name, *lengths, pictures=count)
        plain = model.generate(**inputs, **ARGUMENTS)
        others = inputs | {"pixel_values": torch.randn_like(inputs["pixel_values"])}
        assert model.generate(**others, **ARGUMENTS).tolist() != plain.tolist()
        spec = SpeculativeGenerator(model, tiny.Garbage(answer=plain), draft_length=4, on_unsupported="error")
        assert spec.generate(**inputs, **ARGUMENTS).tolist() == plain.tolist()
        assert spec.report.num_accepted_tokens > 3


@pytest.mark.parametrize(("name", "lengths"), diagonal([*pictured.FILMS, *pictured.SOUNDS], PROMPTS))
def test_films_and_sounds(name, lengths):
    shows = pictured.films if name in pictured.FILMS else pictured.sounds
    model, inputs = pictured.model(name), shows(name, *lengths)
    plain = model.generate(**inputs, **ARGUMENTS)
    shown = "pixel_values_videos" if name in pictured.FILMS else "input_features"
    others = inputs | {shown: 3 * torch.randn_like(inputs[shown])}
    assert model.generate(**others, **ARGUMENTS).tolist() != plain.tolist()
    spec = SpeculativeGenerator(model, tiny.Garbage(answer=plain), draft_length=4, on_unsupported="error")
    assert spec.generate(**inputs, **ARGUMENTS).tolist() == plain.tolist()
    assert spec.report.num_accepted_tokens > 3


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3", "qwen3_5"])
def test_same_seed_same_text(name):
    model, inputs = pictured.model(name), pictured.prompts(name, 7, 4, 9)
    arguments = {"do_sample": True, "top_k": 0, "max_new_tokens": 16}
    torch.manual_seed(3)
    plain = model.generate(**inputs, **arguments, num_return_sequences=2)
    spec = SpeculativeGenerator(model, tiny.Garbage(answer=plain), draft_length=4, on_unsupported="error")
    torch.manual_seed(3)
    assert spec.generate(**inputs, **arguments, num_return_sequences=2).tolist() == plain.tolist()
    assert spec.report.num_accepted_tokens > 3


@pytest.mark.parametrize("lengths", PROMPTS.values(), ids=PROMPTS)
def test_proposers(lengths):
    """A draft model of text alone, a head beside the states that a picture went into, n-grams."""
    model, inputs = pictured.model("llava"), pictured.prompts("llava", *lengths)
    plain = model.generate(**inputs, **ARGUMENTS)
    head = eagle3.head(tap_ids=(0, 1, 2))
    for proposer in (NgramProposer(), DraftModelProposer(tiny.model("llama")), Eagle3Proposer(head)):
        spec = SpeculativeGenerator(model, proposer, draft_length=3, on_unsupported="error")
        assert spec.generate(**inputs, **ARGUMENTS).tolist() == plain.tolist()


@pytest.mark.parametrize("name", ["qwen2_vl", "gemma3"])
def test_what_comes_back_beside_the_text(name):
    """Scores, hidden states of prompt and text, and a cache to go on with."""
    model, inputs = pictured.model(name), pictured.prompts(name, 7, 4)
    arguments = ARGUMENTS | {"return_dict_in_generate": True, "output_scores": True, "output_hidden_states": True}
    plain = model.generate(**inputs, **arguments)
    spec = SpeculativeGenerator(model, tiny.Garbage(answer=plain.sequences), draft_length=4, on_unsupported="error")
    ours = spec.generate(**inputs, **arguments)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    torch.testing.assert_close(torch.stack(ours.scores), torch.stack(plain.scores), atol=1e-3, rtol=1e-3)
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(ours.hidden_states[0][-1][real], plain.hidden_states[0][-1][real])
    for a, b in zip(cache_in(ours).layers, cache_in(plain).layers, strict=True):
        kept = real.new_ones(len(real), plain.sequences.shape[1] - 1)
        kept[:, : real.shape[1]] = real
        kept = kept[:, -b.keys.shape[2] :][:, None, :, None]
        torch.testing.assert_close(a.keys * kept, b.keys * kept, atol=1e-3, rtol=1e-3)


def test_a_later_turn_says_what_it_takes_to_be_speculated_on():
    model = pictured.model("qwen2_vl")
    first = model.generate(**pictured.prompts("qwen2_vl", 7), **ARGUMENTS, return_dict_in_generate=True)
    ids = torch.cat([first.sequences, first.sequences[:, -3:]], 1)
    later = {"input_ids": ids, "attention_mask": torch.ones_like(ids), CACHE: cache_in(first)}
    spec = SpeculativeGenerator(model, NgramProposer())
    with tiny.specdec_warnings() as warned:
        spec.generate(**later, **ARGUMENTS)
    assert [f"without {CACHE}" in said for said in warned] == [True]


REASONS = {"prefill_chunk_size": {"prefill_chunk_size": 4}, "position_ids lack the rows": {"position_ids": ORDER}}


@pytest.mark.parametrize("reason", REASONS)
def test_what_cannot_be_gone_on_from_is_decoded_plainly(reason):
    inputs = pictured.prompts("qwen2_vl", 7) | REASONS[reason]
    assert reason in plainly(pictured.model("qwen2_vl"), inputs)


def test_pictures_before_the_text_have_no_tokens_in_it():
    config = families.tiny_config("git")
    config.vision_config.image_size, config.vision_config.patch_size = 32, 16
    model = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = tiny.PAD, None
    inputs = tiny.prompts(5) | {"pixel_values": torch.randn(1, 3, 32, 32)}
    assert "no placeholder tokens for its images" in plainly(model, inputs)


def plainly(model, inputs) -> str:
    """Its text is plain decoding's, and this is said of it."""
    spec = SpeculativeGenerator(model, "ngram")
    with tiny.specdec_warnings() as messages:
        assert spec.generate(**inputs, **ARGUMENTS).tolist() == model.generate(**inputs, **ARGUMENTS).tolist()
    assert spec.report.num_plain_calls == 1
    return str(messages)
