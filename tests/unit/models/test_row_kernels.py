"""`with spec.exact():` - plain decoding and drafts compute each row with the same arithmetic, on CPUs and devices."""

import copy

import pytest
import torch
from torch import nn

from specdec import SpeculativeGenerator, Unsupported
from specdec.engine.draft_session import CallKind
from specdec.models.cache.buffers import Span
from specdec.models.capability import capability
from specdec.models.compat import CACHE, cache_in
from specdec.models.exact import exactness as exactness_module
from specdec.models.exact import padded_linear, row_kernels
from specdec.models.exact.draft_pass import DraftPass
from specdec.models.exact.exact_view import exact_view
from specdec.models.exact.exactness import exactness
from specdec.models.exact.padded_linear import PaddedLinear, padded_size
from specdec.models.exact.row_linear import ROWS
from specdec.models.positions import RowPositions
from tests.support import interpreted
from tests.support.tiny import CONFIGS, DEVICE, WINDOW, Garbage, on_host, prompts

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="compares bits, in Triton's interpreter for devices")
WIDE = {"hidden_size": 200, "intermediate_size": 1104, "n_embd": 200, "vocab_size": 96}  # sums that have an order
if not interpreted.MISSING:
    interpreted.mend()
GREEDY, SAMPLED = {"do_sample": False}, {"do_sample": True}


def half_model(family, dtype, **settings):
    sizes = {name: size for name, size in WIDE.items() if name in CONFIGS[family]} | settings
    if family != "gpt2":
        sizes["head_dim"] = 32
    return copy.deepcopy(on_host(family, **sizes)).to(dtype)


@pytest.fixture
def padding(monkeypatch):
    """Single rows are padded on any machine on which that gives them the bits of several."""
    monkeypatch.setattr(padded_linear, "SIZES", padded_linear.SIZES[1:])


def text_of(generate, *lengths, new=20, **arguments):
    torch.manual_seed(7)
    return generate(**prompts(*lengths, vocab=60), max_new_tokens=new, pad_token_id=0, **arguments)


@pytest.mark.parametrize(
    ("family", "dtype", "sampling"),
    [
        ("llama", torch.bfloat16, SAMPLED),
        ("mixtral", torch.bfloat16, GREEDY),
        ("gpt2", torch.bfloat16, SAMPLED),
        ("mistral", torch.float16, GREEDY),
    ],
)
def test_plain_decoding_and_every_draft_write_the_same_text(family, dtype, sampling, padding):
    model = half_model(family, dtype)
    spec = SpeculativeGenerator(model, Garbage(), draft_length=5, on_unsupported="error")
    with spec.exact():
        plain = text_of(model.generate, 12, **sampling)
        for proposer in (Garbage(), Garbage(answer=plain)):
            other = SpeculativeGenerator(model, proposer, draft_length=5, on_unsupported="error")
            assert torch.equal(text_of(other.generate, 12, **sampling), plain)
            assert other.report.num_exact_calls == 1
            assert other.report.num_draft_tokens > 15
            assert [*other._sessions.own.estimates] == [CallKind(1, sampling is SAMPLED, exact=True, row_kernels=True)]
    text_of(spec.generate, 12, new=4, **GREEDY)
    assert spec.report.num_exact_calls == 0


@pytest.mark.parametrize("lengths", [(9, 4, 12), (8, 8, 8)])
def test_rows_of_a_batch(lengths, padding):
    model = half_model("llama", torch.bfloat16)
    spec = SpeculativeGenerator(model, Garbage(), draft_length=5, on_unsupported="error")
    with spec.exact():
        assert torch.equal(text_of(spec.generate, *lengths, **GREEDY), text_of(model.generate, *lengths, **GREEDY))
    assert spec.report.num_exact_calls == 1


def layers_of(model):
    return {name: (module, type(module)) for name, module in model.named_modules()}


def test_contexts_may_overlap_and_leave_the_model_as_it_was(monkeypatch):
    monkeypatch.setattr(padded_linear, "padded_size", lambda *_: 2)  # on any machine
    model = half_model("llama", torch.bfloat16)
    before, spec = layers_of(model), SpeculativeGenerator(model, "ngram")
    first, second = spec.exact(), SpeculativeGenerator(model, "ngram").exact()
    first.__enter__()
    assert isinstance(model.lm_head, PaddedLinear)
    second.__enter__()
    first.__exit__(None, None, None)
    assert isinstance(model.model.layers[1].mlp.down_proj, PaddedLinear)
    assert model.lm_head.weight is before["lm_head"][0].weight
    second.__exit__(None, None, None)
    assert layers_of(model) == before
    with pytest.raises(TypeError, match="takes a tensor of token ids"), spec.exact():
        spec.generate("no tensor")
    assert layers_of(model) == before


def test_a_generator_that_is_made_in_the_context_drafts_after_it(monkeypatch):
    """Its hooks are on layers that stay in the model."""
    monkeypatch.setattr(padded_linear, "padded_size", lambda *_: 2)
    model = half_model("llama", torch.bfloat16)
    with SpeculativeGenerator(model, "ngram").exact():
        spec = SpeculativeGenerator(model, "exit:1", draft_length=3, on_unsupported="error")
        layers = [*model.model.layers]
        text_of(spec.generate, 12, new=4, **GREEDY)
    assert [*model.model.layers] == layers
    assert torch.equal(text_of(spec.generate, 12, **GREEDY)[:, :12], prompts(12, vocab=60)["input_ids"])
    assert spec.last_report.num_draft_tokens > 3


def test_the_context_needs_the_rule_that_keeps_texts():
    spec = SpeculativeGenerator(half_model("llama", torch.bfloat16), "ngram", rule="block")
    with pytest.raises(ValueError, match='exact=True needs rule="coupled"'), spec.exact():
        pass


@pytest.mark.slow
def test_more_rows_than_the_kernels_are_for_run_as_plain_decoding():
    spec = SpeculativeGenerator(on_host("llama"), "ngram", on_unsupported="error")
    with spec.exact(), pytest.raises(Unsupported, match=r"not supported for more than 64 rows on a device or within"):
        text_of(spec.generate, *[3] * (ROWS + 1), new=2)


def test_drafts_of_any_size_run_the_kernels_and_prompts_do_not(monkeypatch):
    monkeypatch.setattr(padded_linear, "padded_size", lambda *_: 2)
    monkeypatch.setattr(PaddedLinear, "product", lambda layer, rows: rows.new_zeros(len(rows), layer.out_features))
    model, x = half_model("llama", torch.bfloat16), torch.ones(ROWS + 1, WIDE["hidden_size"], dtype=torch.bfloat16)
    padded = padded_linear.with_padded_linears(model)
    drafts = exact_view(padded, DraftPass(RowPositions(), [Span()]))
    assert not padded.lm_head(x[:ROWS]).any()
    assert not padded.lm_head(x[:ROWS, None]).any()
    assert torch.equal(padded.lm_head(x), model.lm_head(x))
    assert torch.equal(padded.lm_head(x[None, :3]), model.lm_head(x[None, :3]))
    assert not drafts.lm_head(x[None]).any()


@pytest.mark.parametrize(("shape", "dtype"), [((1536, 300), torch.bfloat16), ((1104, 200), torch.float16)])
def test_padded_products_give_a_row_the_same_bits_among_any_rows(shape, dtype, padding):
    layer = nn.Linear(*shape).to(dtype)
    size = padded_size(layer.weight, layer.bias)
    padded, x = PaddedLinear.of(layer, size=size), torch.randn(ROWS, shape[0]).to(dtype)
    with torch.no_grad():
        right = torch.cat([padded(x[i : i + 1]) for i in range(ROWS)])
        assert all(torch.equal(padded(x[:rows]), right[:rows]) for rows in (2, 3, 7, 16, 33, ROWS))
        torch.testing.assert_close(right, layer(x), rtol=2e-2, atol=2e-2)


def off_by_a_bit(result, wrong):
    return torch.nextafter(result, torch.full_like(result, torch.inf)) if wrong else result


def test_a_padded_product_with_other_bits_is_found(monkeypatch):
    right = PaddedLinear.product
    monkeypatch.setattr(padded_linear, "padded_size", lambda *_: 2)
    monkeypatch.setattr(
        PaddedLinear,
        "product",
        lambda layer, rows: off_by_a_bit(right(layer, rows), len(rows) > 1 and layer.in_features == 1104),
    )
    monkeypatch.setattr(exactness_module, "REPAIRS", 1)
    spec = SpeculativeGenerator(half_model("llama", torch.bfloat16), "ngram")
    with spec.exact():
        assert spec.exactness.inexact == ("model.layers.0.mlp.down_proj",)
        with pytest.warns(UserWarning, match=r"exact=True: model\.layers\.0\.mlp\.down_proj may compute drafted"):
            text_of(spec.generate, 12, new=4, **GREEDY)
    assert (spec.report.num_plain_calls, spec.report.num_exact_calls) == (1, 0)


# Devices, whose kernels Triton's interpreter runs on the CPU

SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}


@pytest.fixture
def as_device(monkeypatch):
    """Exact passes run the kernels of devices. The probe is smaller: the interpreter takes 10 ms a program."""
    pytest.importorskip("triton")
    for module in (row_kernels, exactness_module):
        monkeypatch.setattr(module, "compiles_for", lambda device: True)
    for name, value in {"PROMPT": 3, "PARENTS": (-1, 0, 0), "TRIES": 1}.items():
        monkeypatch.setattr(exactness_module, name, value)


def small_half(family):
    return copy.deepcopy(on_host(family, num_hidden_layers=1, **SMALL)).to(torch.float16)


def compared_on_a_device(model, *lengths, new, **sampling):
    """Texts of plain decoding in the context and of exact calls out of it, and the generator of these."""
    with SpeculativeGenerator(model, "ngram").exact():
        plain = text_of(model.generate, *lengths, new=new, **sampling)
    spec = SpeculativeGenerator(model, Garbage(answer=plain), draft_length=3, exact=True, on_unsupported="error")
    return plain, text_of(spec.generate, *lengths, new=new, **sampling), spec


def test_on_a_device_exact_calls_write_the_text_of_plain_decoding_in_the_context(as_device):
    plain, text, spec = compared_on_a_device(small_half("llama"), 4, new=8, **SAMPLED)
    assert torch.equal(text, plain)
    assert spec.report.num_exact_calls == 1
    assert spec.report.num_accepted_tokens > 2


@pytest.mark.slow
def test_on_a_device_ragged_rows_and_windows(as_device):
    """Texts grow longer than a window, and the rows of a batch are padded."""
    plain, text, spec = compared_on_a_device(small_half("mistral"), WINDOW + 1, 3, new=5, **GREEDY)
    assert torch.equal(text, plain)
    assert spec.report.num_exact_calls == 1


def test_on_a_device_a_row_does_not_depend_on_its_neighbours(as_device):
    """The prompts are single tokens, which torch does not read."""
    model = small_half("llama")
    spec = SpeculativeGenerator(model, "ngram", draft_length=3, exact=True, on_unsupported="error")
    together = text_of(spec.generate, 1, 1, new=4, **GREEDY)
    with spec.exact():
        for row, ids in enumerate(prompts(1, 1, vocab=60)["input_ids"]):
            alone = model.generate(ids[None], max_new_tokens=4, pad_token_id=0, **GREEDY)
            assert torch.equal(alone[0], together[row])


def test_on_a_device_a_kernel_with_other_bits_is_found(as_device, monkeypatch):
    from specdec.models.exact.device_layers import KernelLinear

    right = KernelLinear.product
    monkeypatch.setattr(
        KernelLinear,
        "product",
        lambda layer, rows: off_by_a_bit(right(layer, rows), len(rows) > 1 and layer.out_features == 64),
    )
    monkeypatch.setattr(exactness_module, "REPAIRS", 1)
    model = small_half("llama")
    found = exactness(model, capability(model))
    assert found.inexact == ("lm_head",)
    assert found.problem == "exact=True: lm_head may compute drafted tokens otherwise than single ones"


def test_on_a_device_a_cache_of_earlier_turns_is_refused(as_device):
    spec = SpeculativeGenerator(small_half("llama"), "ngram", exact=True, on_unsupported="error")
    first = text_of(spec.model.generate, 4, new=2, return_dict_in_generate=True, **GREEDY)
    more = torch.cat([first.sequences, first.sequences], 1)
    with pytest.raises(Unsupported, match="not supported on a device after a cache of earlier turns"):
        spec.generate(more, **{CACHE: cache_in(first)}, max_new_tokens=2, pad_token_id=0)


def test_on_a_device_half_precision_is_needed(as_device):
    spec = SpeculativeGenerator(on_host("llama"), "ngram", exact=True)
    with pytest.warns(UserWarning, match=r"not supported for torch\.float32 on a device \(load it in bfloat16"):
        text_of(spec.generate, 9, new=2, **GREEDY)
