"""Triton kernels against the modules of transformers, through the interpreter where there is no GPU."""

import importlib.util

import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from specdec.models.kernels import launch as launch_module
from specdec.models.kernels.launch import available, fits
from tests.support import tiny

activation = pytest.importorskip("specdec.models.kernels.activation", reason="triton is not installed")
rms_norm = pytest.importorskip("specdec.models.kernels.rms_norm", reason="triton is not installed")
rotary = pytest.importorskip("specdec.models.kernels.rotary", reason="triton is not installed")

DEVICE = torch.device(tiny.DEVICE)
pytestmark = pytest.mark.skipif(not available(DEVICE), reason="Triton's kernels do not run here")
GEMMA, LATE, LLAMA = rms_norm.GEMMA, rms_norm.LATE, rms_norm.LLAMA
DTYPES = [torch.float32, torch.float16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
NORMS = {LLAMA: LlamaRMSNorm, GEMMA: Gemma3RMSNorm, LATE: nn.RMSNorm}
WITHIN = {torch.float32: {"rtol": 3e-6, "atol": 3e-6}, torch.float16: {"rtol": 2e-3, "atol": 1e-3}}


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def norm_of(rounding, size, dtype):
    """A norm of random weights, and its description for the kernels."""
    module = NORMS[rounding](size, eps=1e-5).to(DEVICE, dtype)
    module.weight.copy_(random(size))
    return module, rms_norm.Norm(module.weight, 1e-5, rounding)


@dtypes
@pytest.mark.parametrize("rounding", NORMS)
@pytest.mark.parametrize("size", [32, 80])
def test_norms(rounding, size, dtype):
    module, norm = norm_of(rounding, size, dtype)
    for states in (
        random(5, size, dtype=dtype),
        random(2, 3, 4, size, dtype=dtype).transpose(1, 2),
        random(2, 5, size, dtype=dtype)[:, -1:] * 1e-2,
        random(3, 2 * size, dtype=dtype)[:, ::2],
    ):
        assert rms_norm.takes(states, norm)
        result = rms_norm.normalized(states, norm)
        assert result.is_contiguous()
        torch.testing.assert_close(result, module(states), **WITHIN[dtype])


@dtypes
@pytest.mark.parametrize(
    ("inner", "outer"),
    [(None, LLAMA), (LLAMA, None), (GEMMA, GEMMA), (None, None)],
    ids=["after", "before", "both", "no"],
)
def test_sums_and_the_norms_around_them(inner, outer, dtype):
    update, residual = random(2, 3, 80, dtype=dtype), random(2, 3, 80, dtype=dtype)
    before, after = (None if kind is None else norm_of(kind, 80, dtype) for kind in (inner, outer))
    total, normed = rms_norm.added(update, residual, before and before[1], after and after[1])
    right = residual + (update if before is None else before[0](update))
    torch.testing.assert_close(total, right, **WITHIN[dtype])
    if after is None:
        assert normed is None
    else:
        torch.testing.assert_close(normed, after[0](total), **WITHIN[dtype])


@dtypes
@pytest.mark.parametrize(
    ("name", "function"), [("SILU", nn.SiLU()), ("GELU_TANH", nn.GELU(approximate="tanh"))], ids=["silu", "gelu"]
)
def test_gated_activations(name, function, dtype):
    kind = getattr(activation, name)
    gate, up = 4 * random(3, 700, dtype=dtype), random(3, 700, dtype=dtype)
    torch.testing.assert_close(activation.gated(gate, up, kind), function(gate) * up, **WITHIN[dtype])
    gate, up = random(2, 3, 10, dtype=dtype).transpose(1, 2), random(2, 10, 3, dtype=dtype)
    torch.testing.assert_close(activation.gated(gate, up, kind), function(gate) * up, **WITHIN[dtype])


def rotation(B, n, dim, dtype):
    angles = random(B, n, dim // 2).repeat(1, 1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def states(B, n, heads, dim, dtype, dense):
    """As a projection gives them, or with heads before nodes."""
    if dense:
        return random(B, heads, n, dim, dtype=dtype)
    return random(B, n, heads * dim, dtype=dtype).view(B, n, heads, dim).transpose(1, 2)


@dtypes
@pytest.mark.parametrize("rounding", [None, LLAMA, GEMMA], ids=["plain", "llama", "gemma"])
@pytest.mark.parametrize(("dim", "rows", "dense"), [(8, 1, True), (80, 2, False), (96, 1, False)])
def test_rotation_and_writing_to_ragged_slots(dim, rows, dense, rounding, dtype):
    """Heads of no power of two; cosines of each row or of all; every other slot keeps what it holds."""
    B, n, heads, kv_heads, room = 2, 3, 3, 2, 11
    query, key, value = (states(B, n, count, size, dtype, dense) for count, size in ((3, dim), (2, dim), (2, 12)))
    cos, sin = rotation(rows, n, dim, dtype)
    slots = torch.tensor([[3, 4, 9], [10, 0, 5]], device=DEVICE)
    buffers = random(B, kv_heads, room, dim, dtype=dtype), random(B, kv_heads, room, 12, dtype=dtype)
    right = [buffer.clone() for buffer in buffers]
    modules, norms = [nn.Identity()] * 2, (None, None)
    if rounding is not None:
        modules, norms = zip(*(norm_of(rounding, dim, dtype) for _ in range(2)), strict=True)
    turned, rotated = apply_rotary_pos_emb(modules[0](query), modules[1](key), cos, sin)
    for buffer, written in zip(right, (rotated, value), strict=True):
        buffer.scatter_(2, slots[:, None, :, None].expand_as(written), written)

    assert rotary.takes(query, key, value, (cos, sin), (*buffers, slots), norms)
    out = torch.full_like(query, torch.nan)
    rotary.rotated_and_written(out, query, key, value, (cos, sin), (*buffers, slots), norms)
    exact = {"rtol": 0, "atol": 0} if rounding is None else WITHIN[dtype]
    torch.testing.assert_close(out, turned, **exact)
    torch.testing.assert_close(buffers[0], right[0], **exact)
    assert torch.equal(buffers[1], right[1])
    assert heads == out.shape[1]


def test_slots_outside_of_a_buffer_are_not_written():
    query, key, value = (states(1, 3, 1, 8, torch.float32, True) for _ in range(3))
    memory = torch.zeros(2, 1, 6, 8, device=DEVICE)  # the buffers are its middle
    keys, values = memory[:1, :, 1:5], memory[1:, :, 1:5]
    slots = torch.tensor([[-1, 2, 4]], device=DEVICE)
    rotary.rotated_and_written(
        torch.empty_like(query), query, key, value, rotation(1, 3, 8, torch.float32), (keys, values, slots)
    )
    assert memory.abs().sum(-1).nonzero().tolist() == [[0, 0, 3], [1, 0, 3]]


def test_what_the_kernels_do_not_take():
    one, two = random(2, 8), random(2, 8, dtype=torch.float16)
    assert fits(one, one)
    assert fits(two)
    assert not fits(one, two)
    assert not fits(one.double())
    assert not fits(one[:0])
    with torch.enable_grad():
        assert not fits(one)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        assert not fits(one)
    assert not rms_norm.takes(one, rms_norm.Norm(random(7), 1e-5))
    query, key = states(1, 2, 2, 8, torch.float32, False), states(1, 2, 1, 8, torch.float32, False)
    buffers = random(1, 1, 4, 8), random(1, 1, 4, 8), torch.tensor([[0, 1]], device=DEVICE)
    whole, partial = rotation(1, 2, 8, torch.float32), rotation(1, 2, 4, torch.float32)
    assert rotary.takes(query, key, key, whole, buffers)
    assert not rotary.takes(query, key, key, partial, buffers)
    assert not rotary.takes(query, key, key, whole, (buffers[0].half(), *buffers[1:]))
    assert not rotary.takes(query, key, key, whole, (*buffers[:2], buffers[2][:, :1]))
    assert not rotary.takes(query[..., ::2], key[..., ::2], key, rotation(1, 2, 4, torch.float32), buffers)


def test_where_kernels_are_available(monkeypatch):
    assert not available(torch.device("meta"))
    with monkeypatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "0")
        assert not available(torch.device("cpu"))
    monkeypatch.setattr(launch_module, "find_spec", lambda name: importlib.util.find_spec(f"no_{name}"))
    assert not available(DEVICE)
