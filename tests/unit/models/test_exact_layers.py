"""`exact=True` for layers that need more than exact products: recurrent, eager and cross-attention, experts."""

import copy

import pytest
import torch

from specdec import SpeculativeGenerator
from specdec.models.cache.stepped_states import NodeState
from specdec.models.exact.linear import ExactLinear
from tests.support import encoded, families
from tests.support.tiny import CONFIGS, Garbage, on_host, prompts

GREEDY, SAMPLED = {"do_sample": False}, {"do_sample": True}
FAMILIES = [
    pytest.param("qwen3_5", (9,)),
    pytest.param("qwen3_5", (11, 4, 8)),
    pytest.param("falcon_h1", (11, 4, 8)),
    pytest.param("gemma2", (11, 4, 8)),
    *(
        pytest.param(name, lengths, marks=pytest.mark.slow)
        for name in ("lfm2", "mamba2", "bamba", "olmo_hybrid", "granite_swa", "gpt_oss", "qwen3_next")
        for lengths in ((9,), (11, 4, 8))
        if len(lengths) == 1 or name not in ("gpt_oss", "qwen3_next")
    ),
]


def half(name):
    model = on_host(name) if name in CONFIGS else families.tiny_model(name)
    return copy.deepcopy(model).to(torch.bfloat16).eval()


def compare(model, inputs, new=32):
    """Compare texts of wrong and mostly right drafts with plain decoding's; return the generator of the last one."""
    for sampling in (GREEDY, SAMPLED):
        arguments = inputs | sampling | {"max_new_tokens": new, "pad_token_id": 0, "eos_token_id": None}
        torch.manual_seed(7)
        plain = model.generate(**arguments)
        for proposer in (Garbage(size=7), Garbage(size=7, answer=plain)):
            spec = SpeculativeGenerator(model, proposer, draft_length=5, on_unsupported="error", exact=True)
            torch.manual_seed(7)
            assert torch.equal(spec.generate(**arguments), plain)
            assert spec.report.num_exact_calls == 1
    assert spec.report.num_rounds < new  # some drafts were accepted
    return spec


@pytest.mark.parametrize(("name", "lengths"), FAMILIES)
def test_drafts_write_the_text_of_plain_decoding(name, lengths):
    compare(half(name), prompts(*lengths, vocab=60))


def test_states_of_a_draft_are_those_of_its_parents(monkeypatch):
    """A planted fault: a node that starts from the state before the draft is found by the probe."""
    monkeypatch.setattr(NodeState, "after", lambda self, nodes: self.state.clone())
    spec = SpeculativeGenerator(half("qwen3_5"), "ngram", exact=True)
    assert not spec.exactness.exact


def test_a_recurrent_layer_reads_its_input_projections_once_a_pass(monkeypatch):
    model, nodes = half("qwen3_5"), []
    weight, forward = model.model.layers[0].linear_attn.in_proj_qkv.weight, ExactLinear.forward

    def counted(self, x):
        if self.weight is weight:
            nodes.append(x.shape[1])
        return forward(self, x)

    monkeypatch.setattr(ExactLinear, "forward", counted)
    spec = SpeculativeGenerator(model, Garbage(size=7), draft_length=5, exact=True)
    assert spec.exactness.exact
    nodes.clear()  # of the probe
    spec.generate(**prompts(9, vocab=60), **GREEDY, max_new_tokens=12, pad_token_id=0)
    assert len(nodes) == spec.report.num_rounds
    assert max(nodes) > 4


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "name", ["bart", "whisper", *(pytest.param(n, marks=pytest.mark.slow) for n in ("t5", "t5gemma"))]
)
def test_decoders_that_read_an_encoder(name, rows):
    model = copy.deepcopy(encoded.model(name)).to(torch.bfloat16).eval()
    inputs = encoded.inputs(name, rows)
    compare(model, {key: x.bfloat16() if x.is_floating_point() else x for key, x in inputs.items()}, new=20)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_eager_attention(attention):
    model = half("llama")
    model.set_attn_implementation(attention)
    compare(model, prompts(11, 4, 8, vocab=60))


@pytest.mark.parametrize("name", ["mixtral", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_within_the_context_a_row_of_experts_does_not_depend_on_its_neighbours(name):
    model = half(name)
    inputs = prompts(8, 8, 8, vocab=60)
    with SpeculativeGenerator(model, "ngram").exact():
        together = model.generate(**inputs, **GREEDY, max_new_tokens=24, pad_token_id=0)
        compare(model, inputs)
        for row in range(3):
            alone = model.generate(inputs["input_ids"][row : row + 1], **GREEDY, max_new_tokens=24, pad_token_id=0)
            assert torch.equal(alone[0], together[row])
