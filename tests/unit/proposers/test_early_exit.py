"""The target's own first layers draft."""

import pytest
import torch

from specdec import DynamicTree, EarlyExitProposer, SpeculativeGenerator
from specdec.proposers.draft_models.early_exit import shorter
from tests.support import tiny

SHAPES = {"chain": {}, "fixed": {"branching": (3, 2, 1)}, "dynamic": {"tree": DynamicTree(depth=3, top_k=3, size=8)}}
LAYERS = {"num_hidden_layers": 4}


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "mistral", "gpt2"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("lengths", [(9,), (20, 3, 14)], ids=["single", "ragged"])
def test_the_text_is_plain_decodings(name, shape, lengths):
    target = tiny.model(name)
    inputs = tiny.prompts(*lengths)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=20)
    spec = SpeculativeGenerator(target, EarlyExitProposer(1, **shape), draft_length=4, on_unsupported="error")
    assert spec.generate(**inputs, do_sample=False, max_new_tokens=20).tolist() == plain.tolist()
    assert spec.report.num_draft_tokens > 0


def idle_layers(count):
    """A target whose layers from `count` on add nothing: what its first ones say is what it says."""
    target = tiny.on_host("llama", **LAYERS)
    with torch.no_grad():
        for layer in target.model.layers[count:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return target.to(tiny.DEVICE)


@pytest.mark.parametrize("lengths", [(9,), (9, 1, 5)], ids=["single", "ragged"])
@pytest.mark.parametrize("shape", [{}, {"branching": (2, 2, 1, 1)}], ids=["chain", "tree"])
def test_layers_that_add_nothing_are_not_missed(lengths, shape):
    """Each of its drafts is right: it sees the whole text, and its own draft, in the target's cache."""
    inputs = tiny.prompts(*lengths)
    spec = SpeculativeGenerator(idle_layers(2), EarlyExitProposer(2, **shape), draft_length=4)
    spec.generate(**inputs, do_sample=False, max_new_tokens=31)
    assert spec.report.mean_acceptance_length > 4.5
    if not shape:
        assert spec.report.num_accepted_tokens == spec.report.num_draft_tokens


def test_a_layer_too_few_is_seen():
    spec = SpeculativeGenerator(idle_layers(2), EarlyExitProposer(1), draft_length=4)
    spec.generate(**tiny.prompts(9), do_sample=False, max_new_tokens=31)
    assert spec.report.num_accepted_tokens < spec.report.num_draft_tokens


@torch.no_grad()
def test_the_shorter_model_has_the_targets_weights():
    target = tiny.model("llama", **LAYERS)
    ids = tiny.prompts(9)["input_ids"]
    state = target(ids, output_hidden_states=True).hidden_states[2]
    expected = target.lm_head(target.model.norm(state))
    torch.testing.assert_close(shorter(target, 2)(ids).logits, expected)
    assert len(target.model.layers) == 4


@pytest.mark.parametrize("sampling", [{}, {"repetition_penalty": 1.3}])
def test_with_the_same_seed_it_is_plain_generates_text(sampling):
    target, inputs = tiny.model("llama", **LAYERS), tiny.prompts(9, 4)
    arguments = {"do_sample": True, "max_new_tokens": 20, "top_k": 0, **sampling}
    torch.manual_seed(5)
    plain = target.generate(**inputs, **arguments)
    torch.manual_seed(5)
    spec = SpeculativeGenerator(target, "exit:2", draft_length=3)
    assert spec.generate(**inputs, **arguments).tolist() == plain.tolist()


def test_a_call_may_ask_for_it():
    target, inputs = tiny.model("llama", **LAYERS), tiny.prompts(9)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=20)
    spec = SpeculativeGenerator(target, "ngram", draft_length=3)
    ours = spec.generate(**inputs, do_sample=False, max_new_tokens=20, assistant_early_exit=2)
    assert ours.tolist() == plain.tolist()
    assert set(spec.last_report.num_drafts_by) == {"EarlyExitProposer"}


@pytest.mark.parametrize(
    ("layers", "message"), [(0, "layers must be at least 1"), (2, "less than the target's 2 layers, got 2")]
)
def test_how_many_layers(layers, message):
    with pytest.raises(ValueError, match=message):
        SpeculativeGenerator(tiny.model("llama"), EarlyExitProposer(layers))


def test_states_would_be_changed():
    with pytest.raises(ValueError, match="recurrent layers"):
        SpeculativeGenerator(tiny.model("lfm2"), EarlyExitProposer(1))
