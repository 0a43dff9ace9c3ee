"""Products of few rows, in Triton's interpreter or on a GPU: the kernels, and the layers that use them."""

from functools import cache

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu, silu

pytest.importorskip("triton")

from specdec.models import few_row_layers, fuser
from specdec.models.compat import CACHE
from specdec.models.few_row_layers import FewRowsLinear, joinable, stand_ins
from specdec.models.fused_layers import with_fused_layers
from specdec.models.fused_modules import FusedAttention, FusedMLP
from specdec.models.kernels import few_rows
from specdec.models.kernels.activation import GELU_TANH, SILU
from specdec.models.kernels.few_rows import DOWN, GATE, OUT, QKV, ROWS, Tiles, joined_gate, joined_linear, takes
from specdec.models.kernels.launch import available
from specdec.models.static_forward import SlottedCache
from tests.support import tiny

DEVICE = torch.device(tiny.DEVICE)
pytestmark = pytest.mark.skipif(not available(DEVICE), reason="Triton's kernels do not run here")
ON_GPU = DEVICE.type == "cuda"
DTYPES = [torch.float16, torch.bfloat16 if ON_GPU else torch.float32]  # the interpreter rounds bfloat16 wrongly
SMALL = Tiles(outputs=16, inputs=32, warps=4, stages=2)
SIZES = [(40,), (16, 33), (48, 9, 20)]


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


def last_bits(ours, right):
    """The largest error, in last bits of the value or of the mean, whichever is larger."""
    size = right.abs().clamp(min=float(right.abs().mean()))
    return float(((ours.double() - right).abs() / (size * torch.finfo(ours.dtype).eps)).max())


def allowed(dtype):
    return 1.01 if dtype != torch.float32 else 16  # the order of a sum changes the last bits in float32


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["", "biases"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("rows", "inputs", "tiles"), [(1, 64, None), (3, 70, SMALL), (16, 128, SMALL)])
def test_joined_products_are_those_of_each_weight(rows, inputs, tiles, sizes, biased, dtype):
    x = random(rows, inputs, dtype=dtype)
    weights = [random(size, inputs, dtype=dtype) for size in sizes]
    biases = [random(size, dtype=dtype) * 10 for size in sizes] if biased else []
    results = joined_linear(x, weights, biases, *([tiles] if tiles else []))
    for index, (result, weight) in enumerate(zip(results, weights, strict=True)):
        right = x.double() @ weight.double().T
        right = right + biases[index].double() if biased else right
        assert result.shape == right.shape
        assert result.dtype == dtype
        assert result.is_contiguous()
        assert last_bits(result, right) <= allowed(dtype)


@pytest.mark.parametrize("rows", range(1, ROWS + 1))
def test_each_number_of_rows(rows):
    x, weights = random(rows, 40, dtype=torch.float16), [random(n, 40, dtype=torch.float16) for n in (20, 17)]
    for result, weight in zip(joined_linear(x, weights, tiles=SMALL), weights, strict=True):
        assert last_bits(result, x.double() @ weight.double().T) <= 1.01
    gated = joined_gate(x, weights[0], weights[0], SILU, tiles=SMALL)
    product = (x.double() @ weights[0].double().T).half().double()
    assert last_bits(gated, silu(product).half().double() * product) <= 4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["", "biases"])
@pytest.mark.parametrize(("rows", "outputs", "inputs", "tiles"), [(1, 33, 128, None), (5, 40, 70, SMALL)])
@pytest.mark.parametrize("activation", [SILU, GELU_TANH])
def test_gated_products_round_as_separate_ones(activation, rows, outputs, inputs, tiles, biased, dtype):
    x = random(rows, inputs, dtype=dtype)
    weights = [random(outputs, inputs, dtype=dtype) * inputs**-0.5 for _ in range(2)]
    biases = [random(outputs, dtype=dtype) for _ in range(2)] if biased else []
    ours = joined_gate(x, *weights, activation, biases, *([tiles] if tiles else []))
    gate, up = (x.double() @ weight.double().T for weight in weights)
    if biased:
        gate, up = gate + biases[0].double(), up + biases[1].double()
    gate, up = gate.to(dtype).double(), up.to(dtype).double()
    acted = silu(gate) if activation == SILU else gelu(gate, approximate="tanh")
    right = acted.to(dtype).double() * up
    assert last_bits(ours, right) <= (4 if dtype != torch.float32 else 32)
    if dtype != torch.float32:  # with other roundings most values differ
        assert float((ours != right.to(dtype)).float().mean()) < 0.05


def test_what_the_kernels_take():
    x, weight = random(2, 3, 8, dtype=torch.float16), random(4, 8, dtype=torch.float16)
    assert takes(x, [weight])
    assert not takes(random(1, ROWS + 1, 8, dtype=torch.float16), [weight])
    assert not takes(x.float(), [weight])
    assert not takes(x, [weight], [random(4)])
    assert not takes(x, [random(8, 4, dtype=torch.float16).T])
    assert not takes(x[:0], [weight])
    with torch.enable_grad():
        assert not takes(x, [weight])


# Layers


def linear(outputs, inputs=32, bias=False, dtype=torch.float16):
    return nn.Linear(inputs, outputs, bias=bias, device=DEVICE, dtype=dtype)


def test_layers_with_code_of_their_own_are_not_joined():
    class Other(nn.Linear):
        pass

    assert joinable(linear(8), linear(4))
    assert joinable(linear(8, bias=True), linear(4, bias=True))
    assert not joinable(linear(8, bias=True), linear(4))
    assert not joinable(linear(8), Other(32, 4, device=DEVICE))
    assert not joinable(linear(8), None)
    hooked, replaced = linear(8), linear(8)
    hooked.register_forward_hook(lambda *_: None)
    replaced.forward = lambda x: x
    assert not joinable(hooked)
    assert not joinable(replaced)


def test_one_kernel_computes_the_products_for_a_tensor(launches):
    layers = [linear(16, bias=True), linear(8, bias=True), linear(8, bias=True)]
    first, second, third = stand_ins(*layers)
    x, other = random(1, 3, 32, dtype=torch.float16), random(1, 3, 32, dtype=torch.float16)
    for stand_in, layer in zip((first, second, third), layers, strict=True):
        torch.testing.assert_close(stand_in(x), layer(x), rtol=2e-3, atol=2e-3)
    assert len(launches) == 1
    torch.testing.assert_close(second(other), layers[1](other), rtol=2e-3, atol=2e-3)
    many = random(1, ROWS + 1, 32, dtype=torch.float16)
    assert torch.equal(third(many), layers[2](many))
    assert len(launches) == 2


@pytest.fixture
def launches(monkeypatch):
    """Kernels of few rows that were launched."""
    made, launch = [], few_rows.launch

    def noted(kernel, *args, **kwargs):
        made.append(kernel)
        launch(kernel, *args, **kwargs)

    monkeypatch.setattr(few_rows, "launch", noted)
    return made


@pytest.fixture
def in_use(monkeypatch):
    monkeypatch.setattr(few_rows, "IN_USE", frozenset({QKV, GATE, OUT, DOWN}))
    monkeypatch.setattr(fuser, "_results", {})


MODELS = {
    "llama": {},
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "qwen3": {},
    "gemma3": {"layer_types": ["sliding_attention", "full_attention"]},
}


@cache
def model(name):
    made = tiny.on_host(name.split()[0], 0, num_hidden_layers=2, **MODELS[name])
    for weight in made.parameters():
        if weight.dim() == 1:
            weight.add_(torch.randn_like(weight) * 0.1)
    return made.to(DEVICE)


def attended(view, states):
    """Output of a view's decoder layer for states (1, n, hidden), and its buffers."""
    layer, config, n = view.model.layers[-1], view.config, states.shape[1]
    positions = torch.arange(n, device=DEVICE)[None]
    kinds = [config.layer_types[-1]] if config.model_type.startswith("gemma3") else []
    rotation = view.model.rotary_emb(states, positions, *kinds)
    dim = layer.self_attn.head_dim
    buffers = [torch.zeros(1, config.num_key_value_heads, 32, dim, device=DEVICE, dtype=states.dtype) for _ in range(2)]
    index = layer.self_attn.layer_idx
    cache = SlottedCache({index: (*buffers, positions)})
    mask = torch.ones(1, 1, n, 32, dtype=torch.bool, device=DEVICE).tril()
    result = layer(states, attention_mask=mask, position_ids=positions, position_embeddings=rotation, **{CACHE: cache})
    return [result, *buffers]


@pytest.mark.usefixtures("in_use")
@pytest.mark.parametrize("name", MODELS)
def test_fused_layers_run_their_products_in_these_kernels(name, launches):
    target = model(name)
    view = with_fused_layers(target)
    for kind in (FusedAttention, FusedMLP):
        found = [module for module in view.modules() if isinstance(module, kind)]
        assert len(found) == 2
        assert all(module.joined for module in found)
    assert sum(isinstance(module, FewRowsLinear) for module in view.modules()) == 4
    launches.clear()
    for n in (3, ROWS + 1):
        states = random(1, n, target.config.hidden_size, dtype=target.dtype)
        for ours, right in zip(attended(view, states), attended(target, states), strict=True):
            torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-4)
        assert [kernel.__name__ for kernel in launches] == ["_linear", "_linear", "_gate", "_linear"]


@pytest.mark.usefixtures("in_use")
def test_layers_whose_products_differ_keep_their_own(monkeypatch):
    right = few_row_layers.joined_linear
    monkeypatch.setattr(few_row_layers, "joined_linear", lambda *given: tuple(part * 1.01 for part in right(*given)))
    view = with_fused_layers(model("llama"))
    found = [module for module in view.modules() if isinstance(module, FusedAttention)]
    assert found
    assert not any(module.joined for module in found)
    assert not any(isinstance(module, FewRowsLinear) for module in view.modules())
