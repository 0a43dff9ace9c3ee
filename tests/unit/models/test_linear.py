"""`with_fast_linears`: the ways to multiply, choosing among them, and models that run as views."""

import copy
from itertools import count

import pytest
import torch
from torch import nn

from specdec import DraftModelProposer, Eagle3Proposer, SpeculativeGenerator
from specdec.models import linear
from specdec.models.int8_linear import with_int8_linears
from specdec.models.linear import Autotuner, FastLinear, by_blocks, by_columns, by_onednn, by_rows, with_fast_linears
from specdec.models.views import shallow_copy_as
from specdec.utils import timing
from tests.support import eagle3, tiny

ALL_WAYS = [by_rows, by_columns, by_onednn, by_blocks]


@pytest.fixture
def eager(monkeypatch):
    """Tiny layers count as large ones; what other tests found out is forgotten."""
    monkeypatch.setattr(linear, "SMALLEST", 1)
    monkeypatch.setattr(linear, "_autotuners", {})


def quick_layer(*shape, bias=True, dtype=torch.float32):
    torch.manual_seed(0)
    return shallow_copy_as(nn.Linear(*shape, bias=bias).to(dtype), FastLinear)


@torch.no_grad()
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_way_gives_the_same_product(dtype, bias, monkeypatch):
    monkeypatch.setattr(linear, "BLOCK", 64 * 20)  # so that the last block is a smaller one
    layer = quick_layer(64, 50, bias=bias, dtype=dtype)
    for rows in (1, 2, 3, 16, 70):
        x = torch.randn(rows, 64).to(dtype)
        for kernel in linear.kernels(dtype):
            torch.testing.assert_close(kernel(x, layer), by_rows(x, layer))
            assert kernel(x, layer).is_contiguous()


def test_a_layer_takes_any_shape_and_leaves_gradients_and_other_types_to_torch(eager):
    layer = quick_layer(8, 5)
    plain = nn.Linear(8, 5)
    plain.load_state_dict(layer.state_dict())
    with torch.no_grad():
        for shape in ((8,), (3, 8), (2, 3, 8), (2, 0, 8), (2, 70, 8)):
            x = torch.randn(shape)
            torch.testing.assert_close(layer(x), plain(x))
    layer(torch.randn(2, 8)).sum().backward()
    assert layer.weight.grad is not None


def test_to_find_out_what_works_draws_no_random_numbers():
    """A process' first sampled call would write another text than plain decoding with the same seed."""
    before = torch.get_rng_state()
    for dtype in (torch.float32, torch.bfloat16):
        assert linear.kernels.__wrapped__(dtype)
    assert torch.equal(torch.get_rng_state(), before)


class Packed(torch.Tensor):
    """As torchao has weights: of a class of their own that says which tensors it is made of, in torch's own layers."""

    def __tensor_flatten__(self):
        return ["packed", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts, context, size, stride):
        raise NotImplementedError("nothing here is compiled")


def test_quantised_weights_are_left_alone(eager):
    layer = nn.Linear(64, 32)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Packed), requires_grad=False)
    assert with_fast_linears(layer) is layer
    assert with_int8_linears(layer) is layer
    assert type(with_fast_linears(nn.Linear(64, 32))) is FastLinear


class Clock:
    """Ways whose calls take as long as they say."""

    def __init__(self, monkeypatch, **seconds):
        self.now, self.calls = 0.0, []
        monkeypatch.setattr(linear, "perf_counter", lambda: self.now)
        monkeypatch.setattr(timing, "perf_counter", lambda: self.now)
        self.kernels = [self._way(name, iter(taken)) for name, taken in seconds.items()]

    def _way(self, name, taken):
        def kernel(rows, layer):
            self.calls.append(name)
            self.now += next(taken)
            return by_rows(rows, layer)

        kernel.__name__ = name
        return kernel


def test_ways_take_turns_and_the_fastest_stays(monkeypatch):
    clock = Clock(monkeypatch, one=[9, 4, 4, 4, 4], two=[5] * 5, three=[6, 6, 3, 6, 6])
    autotuner, layer = Autotuner(clock.kernels), quick_layer(8, 5)
    while autotuner.best is None:
        autotuner(torch.randn(1, 8), layer)
    assert autotuner.best.__name__ == "three"
    assert clock.calls == ["one", "two", "three"] * 5


def test_a_hopeless_way_is_tried_twice(monkeypatch):
    clock = Clock(monkeypatch, slow=[100, 3], fast=[1] * 5)
    autotuner, layer = Autotuner(clock.kernels), quick_layer(8, 5)
    while autotuner.best is None:
        autotuner(torch.randn(1, 8), layer)
    assert clock.calls == ["slow", "fast", "slow", *["fast"] * 4]


def test_what_slow_ways_took_is_no_time_that_passed(monkeypatch):
    watch = Clock(monkeypatch, slow=[100, 30], fast=[1] * 5)
    autotuner, layer = Autotuner(watch.kernels), quick_layer(8, 5)
    autotuner(torch.randn(1, 8), layer)
    before = timing.clock()
    while autotuner.best is None:
        autotuner(torch.randn(1, 8), layer)
    assert timing.clock() - before == pytest.approx(5 + 1)  # the second try of the slow way counts as a fast one
    assert watch.now == 100 + 30 + 5


def test_an_lm_head_is_multiplied_as_the_layers_before_it(eager, monkeypatch):
    monkeypatch.setattr(linear, "LONG", 16)
    layer, head = quick_layer(8, 20), quick_layer(8, 400)
    with torch.no_grad():
        for _ in range(5 * len(linear.kernels(torch.float32))):
            layer(torch.randn(1, 8))
        assert len(linear._autotuners) == 1
        head(torch.randn(1, 8))
    assert len(linear._autotuners) == 1


def test_a_layer_remembers_what_is_best_for_a_shape(eager, monkeypatch):
    layer, x = quick_layer(8, 5), torch.randn(1, 3, 8)
    with torch.no_grad():
        for _ in range(linear.TRIES * len(linear.kernels(torch.float32)) + 1):
            layer(x)
        monkeypatch.setattr(linear, "_autotuners", {})
        torch.testing.assert_close(layer(x), by_rows(x, layer))
        assert not linear._autotuners
        layer(x[:, :2])  # another shape
        assert len(linear._autotuners) == 1
    monkeypatch.setattr(torch, "get_num_threads", lambda: 17)
    with torch.no_grad():
        layer(x)
    assert len(linear._autotuners) == 2
    assert layer(x.requires_grad_()).requires_grad


def test_many_rows_are_tried_on_a_few(eager, monkeypatch):
    sizes = []
    real = by_rows

    def noting(rows, layer):
        sizes.append(len(rows))
        return real(rows, layer)

    monkeypatch.setattr(linear, "kernels", lambda dtype: (noting, by_columns))
    with torch.no_grad():
        quick_layer(8, 5)(torch.randn(500, 8))
    assert sizes[0] == linear.MANY
    assert sizes.count(500) <= 1


class Subclass(nn.Linear):
    pass


def test_a_view_swaps_plain_linear_layers_alone(eager):
    model = copy.deepcopy(tiny.model("llama"))
    layers = model.model.layers
    layers[0].mlp.up_proj.__class__ = Subclass  # quantised, say
    layers[0].mlp.down_proj.forward = layers[0].mlp.down_proj.forward  # accelerate hooks a module in this way
    layers[1].mlp.forward = layers[1].mlp.forward
    view = with_fast_linears(model)
    kinds = {name: type(module) for name, module in view.named_modules()}
    assert kinds["lm_head"] is kinds["model.layers.0.mlp.gate_proj"] is FastLinear
    assert kinds["model.layers.0.mlp.up_proj"] is Subclass
    assert kinds["model.layers.0.mlp.down_proj"] is kinds["model.layers.1.mlp.gate_proj"] is nn.Linear
    assert view.model.layers[0].input_layernorm is layers[0].input_layernorm
    assert not any(type(module) is FastLinear for module in model.modules())
    assert view.get_input_embeddings() is model.get_input_embeddings()
    ids = tiny.prompts(9)["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(view(ids).logits, model(ids).logits)


def test_small_layers_stay_and_a_model_of_them_is_its_own_view():
    model = tiny.model("llama")
    assert with_fast_linears(model) is model


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_moe", "gpt_neox"])
@pytest.mark.parametrize("proposer", ["ngram", "draft", "eagle3"])
def test_views_write_what_plain_decoding_writes(eager, name, proposer):
    model = tiny.model(name)
    made = {
        "ngram": lambda: "ngram",
        "draft": lambda: DraftModelProposer(model),
        "eagle3": lambda: Eagle3Proposer(eagle3.head()),
    }[proposer]()
    inputs = tiny.prompts(12, 7)
    spec = SpeculativeGenerator(model, made, draft_length=3, on_unsupported="error")
    assert torch.equal(
        spec.generate(**inputs, max_new_tokens=24, do_sample=False),
        model.generate(**inputs, max_new_tokens=24, do_sample=False),
    )


def test_hooks_and_recorded_states_are_those_of_plain_decoding(eager):
    model = copy.deepcopy(tiny.model("llama"))
    calls = count()
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: next(calls) and output * 1.0 + 0.1)
    before = len(model.model.layers[0]._forward_hooks)
    arguments = {
        "max_new_tokens": 12,
        "do_sample": False,
        "output_hidden_states": True,
        "return_dict_in_generate": True,
    }
    spec = SpeculativeGenerator(model, "ngram", on_unsupported="error")
    for _ in range(2):
        ours = spec.generate(**tiny.prompts(12), **arguments)
        assert len(model.model.layers[0]._forward_hooks) == before
    assert next(calls) > 12
    plain = model.generate(**tiny.prompts(12), **arguments)
    assert torch.equal(ours.sequences, plain.sequences)
    for mine, theirs in zip(ours.hidden_states, plain.hidden_states, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_products_do_not_depend_on_the_default_dtype_and_device():
    weight, rows = torch.randn(40, 24).bfloat16(), torch.randn(3, 24).bfloat16()
    right = linear.product_in_blocks(weight, rows)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            assert torch.equal(linear.product_in_blocks(weight, rows), right)
            assert linear._onednn_works() in (True, False)
    finally:
        torch.set_default_dtype(torch.float32)
