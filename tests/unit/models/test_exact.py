"""`exact=True`: in half precision, drafted tokens have the bits of plain decoding, and texts are the same."""

import copy
import warnings

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from specdec import SpeculativeGenerator, Unsupported
from specdec.models.capability import capability
from specdec.models.compat import CACHE, cache_in
from specdec.models.exact import linear
from specdec.models.exact.exactness import exactness
from specdec.models.linear import with_fast_linears
from tests.support.tiny import CONFIGS, Garbage, on_host, prompts

# Wide enough for the sums of a product to have an order, and odd enough for vectors to leave a rest.
WIDE = {"hidden_size": 200, "intermediate_size": 1104, "n_embd": 200, "vocab_size": 96}


def half_model(family, dtype, **settings):
    sizes = {name: size for name, size in WIDE.items() if name in CONFIGS[family]} | settings
    if family != "gpt2":
        sizes["head_dim"] = 32
    return copy.deepcopy(on_host(family, **sizes)).to(dtype)


def texts(model, spec, lengths=(12,), new=40, **sampling):
    inputs = prompts(*lengths, vocab=60)
    found = []
    for generate in (model.generate, spec.generate):
        torch.manual_seed(7)
        found.append(generate(**inputs, max_new_tokens=new, pad_token_id=0, **sampling))
    return found


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, torch.bfloat16) for family in ("llama", "qwen3", "gemma3", "mistral", "gpt2", "phi", "mixtral")),
        *((family, torch.float16) for family in ("llama", "gpt_neox")),
    ],
)
def test_every_draft_gives_the_text_of_plain_decoding(family, dtype):
    model = half_model(family, dtype)
    plain = model.generate(**prompts(12, vocab=60), max_new_tokens=40, pad_token_id=0, do_sample=False)
    for proposer, sampling in (
        (Garbage(answer=plain), {"do_sample": False}),
        (Garbage(), {"do_sample": False}),
        (Garbage(answer=plain), {"do_sample": True}),
    ):
        spec = SpeculativeGenerator(model, proposer, draft_length=5, exact=True, on_unsupported="error")
        expected, text = texts(model, spec, **sampling)
        assert torch.equal(text, expected)
        assert spec.report.num_exact_calls == 1
        assert spec.report.num_draft_tokens > 20


def test_a_planted_product_with_other_bits_is_found(monkeypatch):
    """A way to multiply that was taken for exact and is not: the probe names the layers."""
    monkeypatch.setattr(linear, "_kernels", {})

    def off(x, weight, bias):
        right = linear.one_by_one(x, weight, bias)
        return torch.nextafter(right, torch.full_like(right, torch.inf)) if weight.shape[1] == 1104 else right

    monkeypatch.setattr(linear, "exact_kernel", lambda *_: off)
    monkeypatch.setattr("specdec.models.exact.exactness.REPAIRS", 1)
    model = half_model("llama", torch.bfloat16)
    found = exactness(model, capability(model))
    assert not found.exact
    assert found.inexact == ("model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj")[:1]


def test_a_model_that_stays_inexact_runs_plain_decoding_and_says_why(monkeypatch):
    model = half_model("llama", torch.bfloat16)
    monkeypatch.setattr(
        linear, "exact_kernel", lambda *_: lambda x, weight, bias: nn.functional.linear(x, weight, bias) + 1
    )
    monkeypatch.setattr("specdec.models.exact.exactness.REPAIRS", 1)
    spec = SpeculativeGenerator(model, "ngram", exact=True)
    with pytest.warns(UserWarning, match=r"exact=True: model\.layers\.0\..* may compute drafted tokens otherwise"):
        expected, text = texts(model, spec, do_sample=False)
    assert torch.equal(text, expected)
    assert (spec.report.num_plain_calls, spec.report.num_exact_calls) == (1, 0)


class CountsTokens(nn.Module):
    """An MLP whose result depends on how many tokens a pass has."""

    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp

    def forward(self, hidden):
        return self.mlp(hidden) * (1 + 2**-7 * (hidden.shape[1] > 1))


def test_a_module_that_mixes_tokens_runs_each_of_them_alone():
    model = half_model("llama", torch.bfloat16)
    model.model.layers[1].mlp = CountsTokens(model.model.layers[1].mlp)
    found = exactness(model, capability(model))
    assert found.exact
    assert found.alone == ("model.layers.1.mlp",)
    spec = SpeculativeGenerator(model, Garbage(), draft_length=5, exact=True, on_unsupported="error")
    expected, text = texts(model, spec, do_sample=False)
    assert torch.equal(text, expected)


@pytest.mark.parametrize(
    ("family", "dtype", "lengths"),
    [
        ("llama", torch.bfloat16, (9, 4, 12)),
        ("llama", torch.bfloat16, (8, 8, 8)),
        ("llama", torch.float16, (9, 4, 12)),
        ("gemma3", torch.bfloat16, (9, 4, 12)),
        ("gpt2", torch.bfloat16, (9, 4, 12)),
    ],
)
def test_rows_of_a_batch_write_what_plain_decoding_writes(family, dtype, lengths):
    model = half_model(family, dtype)
    plain = model.generate(**prompts(*lengths, vocab=60), max_new_tokens=40, pad_token_id=0, do_sample=False)
    for proposer, sampling in (
        (Garbage(answer=plain), {"do_sample": False}),
        (Garbage(), {"do_sample": True}),
    ):
        spec = SpeculativeGenerator(model, proposer, draft_length=5, exact=True, on_unsupported="error")
        expected, text = texts(model, spec, lengths, **sampling)
        assert torch.equal(text, expected)
        assert spec.report.num_exact_calls == 1


def test_a_padded_row_alone_is_read_with_its_padding():
    model = half_model("llama", torch.bfloat16)
    spec = SpeculativeGenerator(model, Garbage(), draft_length=5, exact=True, on_unsupported="error")
    inputs = {name: torch.nn.functional.pad(value, (3, 0)) for name, value in prompts(9, vocab=60).items()}
    expected, text = (
        generate(**inputs, max_new_tokens=30, do_sample=False, pad_token_id=0)
        for generate in (model.generate, spec.generate)
    )
    assert torch.equal(text, expected)


def test_padded_embeddings_without_ids_keep_their_padding():
    model = half_model("llama", torch.bfloat16)
    inputs = prompts(9, 4, vocab=60)
    inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids")).detach()
    spec = SpeculativeGenerator(model, Garbage(), draft_length=5, exact=True, on_unsupported="error")
    arguments = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(spec.generate(**inputs, **arguments), model.generate(**inputs, **arguments))


def test_a_second_turn_with_the_first_ones_cache():
    model = half_model("llama", torch.bfloat16)
    spec = SpeculativeGenerator(model, Garbage(), draft_length=5, exact=True, on_unsupported="error")
    found = []
    for generate in (model.generate, spec.generate):
        arguments = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
        first = generate(**prompts(12, vocab=60), return_dict_in_generate=True, **arguments)
        more = torch.cat([first.sequences, prompts(8, seed=3, vocab=60)["input_ids"]], 1)
        found.append(generate(more, **{CACHE: cache_in(first)}, **arguments))
    assert torch.equal(*found)
    assert spec.report.num_exact_calls == 2


@pytest.mark.parametrize(
    ("family", "settings", "why"),
    [
        ("llama", {"prefill_chunk_size": 4}, "with prefill_chunk_size"),
        ("llama", {"cache_implementation": "static"}, "with cache_implementation='static'"),
        ("gemma3", {CACHE: DynamicCache}, "for sliding windows with a cache of the caller"),
    ],
)
def test_what_cannot_be_exact_is_refused(family, settings, why):
    spec = SpeculativeGenerator(half_model(family, torch.bfloat16), "ngram", exact=True, on_unsupported="error")
    settings = {name: value() if isinstance(value, type) else value for name, value in settings.items()}
    with pytest.raises(Unsupported, match=why):
        spec.generate(**prompts(12, vocab=60), max_new_tokens=4, pad_token_id=0, **settings)


def test_other_rules_write_other_texts():
    with pytest.raises(ValueError, match='exact=True needs rule="coupled"'):
        SpeculativeGenerator(half_model("llama", torch.bfloat16), "ngram", exact=True, rule="block")


def test_experts_in_batches_run_as_plain_decoding():
    model = half_model("mixtral", torch.bfloat16)
    spec = SpeculativeGenerator(model, "ngram", exact=True)
    with pytest.warns(UserWarning, match="exact=True is not supported for mixtures of experts in a batch"):
        expected, text = texts(model, spec, (9, 4), do_sample=False)
    assert torch.equal(text, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("bias", [True, False])
def test_every_way_gives_each_node_its_own_products_bits(dtype, rows, bias):
    torch.manual_seed(0)
    layer = nn.Linear(1536, 2048, bias=bias).to(dtype)
    for nodes in (2, 3, 8):
        x = torch.randn(rows, nodes, 1536).to(dtype)
        right = torch.stack([layer(x[:, i : i + 1].contiguous())[:, 0] for i in range(nodes)], 1)
        found = linear.exact_kernel(layer.weight, layer.bias, rows, nodes)
        with torch.no_grad():
            assert torch.equal(found(x, layer.weight, layer.bias), right)


def test_nodes_are_multiplied_in_the_largest_groups_that_have_their_bits(monkeypatch):
    """As with AMX, where five rows of many inputs may have other bits than four."""
    groups = []

    def product(x, weight, bias):
        groups.append(len(x))
        right = torch.cat([nn.functional.linear(row, weight, bias) for row in x.split(1)])
        return right if len(x) < 5 else torch.nextafter(right, torch.full_like(right, torch.inf))

    monkeypatch.setattr(linear, "_kernels", {})
    monkeypatch.setattr(linear, "linear", product)
    weight, x = torch.randn(64, 96).bfloat16(), torch.randn(1, 7, 96).bfloat16()
    found = linear.exact_kernel(weight, None, 1, 7)
    groups.clear()
    assert torch.equal(found(x, weight, None), linear.one_by_one(x, weight, None))
    assert groups == [4, 4] + [1] * 7


def test_the_model_keeps_its_modules_and_its_other_generators_are_not_slowed():
    model = half_model("llama", torch.bfloat16)
    before = {name: type(module) for name, module in model.named_modules()}
    hooks = sum(len(module._forward_hooks) for module in model.modules())
    SpeculativeGenerator(model, "ngram", exact=True).generate(**prompts(12, vocab=60), max_new_tokens=8, pad_token_id=0)
    assert {name: type(module) for name, module in model.named_modules()} == before
    assert sum(len(module._forward_hooks) for module in model.modules()) == hooks
    assert with_fast_linears(model) is not None


def test_exact_must_be_a_bool():
    with warnings.catch_warnings(), pytest.raises(ValueError, match="exact must be one of True, False, got 'yes'"):
        SpeculativeGenerator(half_model("llama", torch.bfloat16), "ngram", exact="yes")
