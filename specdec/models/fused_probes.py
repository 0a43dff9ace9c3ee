"""Comparisons of fused modules with the modules they replace, on random input.

Random numbers come from a generator of their own. Modules are run without their hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from specdec.models.compat import CACHE
from specdec.models.fused_modules import (
    ROTATE,
    FusedAttention,
    FusedLayer,
    FusedMLP,
    FusedNorm,
    Layout,
    fused,
    rotate,
    with_globals,
)
from specdec.models.kernels.activation import GELU_TANH, SILU
from specdec.models.kernels.rms_norm import GEMMA, LATE, LLAMA
from specdec.models.views import shallow_copy_as

ATTEND = "ALL_ATTENTION_FUNCTIONS"  # transformers' attention functions, a global of modeling files
SCALES = (1e-3, 0.05, 1.0, 8.0)  # of random rows: the smallest show what is added to a mean square
ROWS = 16  # random rows of each scale
SLOTS = 8


@contextmanager
def conditions(device: torch.device) -> Iterator[None]:
    """No gradients and no autocast, as the kernels need."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def agree(ours: Tensor, right: Tensor) -> bool:
    """Return whether two results are the same up to the order of sums and the last bit of a function such as tanh.

    Errors count relative to a value plus its row's mean, since a rotation mixes values, and an activation that is
    almost 0 has few exact bits. The order of a mean's sum changes its last bits in float32, and with it the rounding of
    few values to 16 bits: one in a hundred may differ, by about its last bit. With code that rounds elsewhere, tens of
    them differ. In float32 all values may differ in their last bits.
    """
    if ours.shape != right.shape or ours.dtype != right.dtype:
        return False
    eps, exact = torch.finfo(right.dtype).eps, right.float()
    error = (ours.float() - exact).abs() / (exact.abs() + exact.abs().mean(-1, keepdim=True)).clamp(min=1e-30)
    if right.dtype == torch.float32:
        return bool((error <= 16 * eps).all())
    return bool((error <= 2 * eps).all()) and int((error > eps / 16).sum()) <= 1 + error.numel() // 100


def close(ours: Tensor, right: Tensor) -> bool:
    """Return whether two results are the same up to the rounding of products.

    Another order of a product's sum may round any value to the other side, by its last bit. Four roundings follow one
    another at most: of a product, an activation or norm, and what multiplies it. Errors count as in `agree`.
    """
    if ours.shape != right.shape or ours.dtype != right.dtype:
        return False
    exact = right.float()
    error = (ours.float() - exact).abs() / (exact.abs() + exact.abs().mean(-1, keepdim=True)).clamp(min=1e-30)
    return bool((error <= (16 if right.dtype == torch.float32 else 4) * torch.finfo(right.dtype).eps).all())


class Random:
    """Random tensors of a dtype on a device."""

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self._dtype, self._device = dtype, device
        self._generator: torch.Generator | None = None  # made at the first use, since a capture may not make one

    def __call__(self, *shape: int) -> Tensor:
        self._generator = self._generator or torch.Generator(self._device).manual_seed(0)
        made = torch.randn(*shape, generator=self._generator, device=self._device, dtype=torch.float32)
        return made.to(self._dtype)

    def rows(self, size: int) -> Tensor:
        """(1, rows, size) of all `SCALES`."""
        scales = torch.tensor(SCALES, device=self._device).repeat(ROWS)
        return self(1, len(scales), size) * scales[None, :, None].to(self._dtype)


def rounding_of(module: Any, random: Random) -> int | None:
    """The rounding with which `FusedNorm` gives an RMSNorm's output; None if there is none."""
    size = module.weight.shape[0]
    copied, states = shallow_copy_as(module, type(module)), random.rows(size)
    copied._parameters = {**module._parameters, "weight": nn.Parameter(random(size), requires_grad=False)}
    right = type(module).forward(copied, states)
    for rounding in (LLAMA, GEMMA, LATE):
        if agree(fused(copied, FusedNorm, rounding=rounding).forward(states), right):
            return rounding
    return None


class Given(nn.Module):
    """Returns the same tensor for any input."""

    def __init__(self, value: Tensor):
        super().__init__()
        self.value = value

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.value


def activation_of(module: Any, random: Random) -> int | None:
    """The activation with which `FusedMLP` gives an MLP's output; None if there is none."""
    gate, up = random.rows(256), random.rows(256)
    copied = shallow_copy_as(module, type(module))
    copied._modules |= {"gate_proj": Given(gate), "up_proj": Given(up), "down_proj": nn.Identity()}
    right = type(module).forward(copied, gate)
    for activation in (SILU, GELU_TANH):
        if agree(fused(copied, FusedMLP, activation=activation).forward(gate), right):
            return activation
    return None


class Mixed(nn.Module):
    """A cheap function of its input, for attention or an MLP; keeps the other arguments."""

    def __init__(self, pair: bool):
        super().__init__()
        self.pair = pair

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        self.seen = kwargs
        mixed = (hidden_states * 0.5).roll(1, -1)
        return (mixed, None) if self.pair else mixed


ARGUMENTS = (CACHE, "attention_mask", "position_ids", "position_embeddings", "use_cache")


def sums_agree(module: Any, children: dict[str, nn.Module], layout: Layout, random: Random) -> bool:
    """Return whether `FusedLayer` gives a decoder layer's output, whatever its attention and MLP compute.

    Args:
        module: the layer.
        children: the layer's modules for the fused layer, whose norms are `FusedNorm`.
        layout: names of the norms.
        random: random tensors.
    """
    copied = shallow_copy_as(module, type(module))
    copied._modules |= {"self_attn": Mixed(pair=True), "mlp": Mixed(pair=False)}
    ours = fused(copied, FusedLayer, layout=layout)
    ours._modules = children | {"self_attn": Mixed(pair=True), "mlp": Mixed(pair=False)}
    states, given = random.rows(getattr(module, layout.first).weight.shape[0]), {name: object() for name in ARGUMENTS}
    result, right = ours.forward(states, **given), type(module).forward(copied, states, **given)
    kept, wanted = (layer._modules["self_attn"].seen for layer in (ours, copied))
    return agree(result, right) and all(kept.get(name) is value for name, value in wanted.items())


class Buffers:
    """A cache of one layer, whose buffers have the shapes of the first keys and values."""

    def __init__(self, slots: Tensor):
        self._slots = slots
        self._made: tuple[Tensor, ...] = ()

    def cleared(self) -> Buffers:
        """An empty cache of the same shapes."""
        other = Buffers(self._slots)
        other._made = tuple(torch.zeros_like(buffer) for buffer in self._made)
        return other

    def fixed_buffers(self, layer_idx: int) -> tuple[Tensor, ...]:
        return (*self._made, self._slots)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, ...]:
        given = (key_states, value_states)
        if not self._made:
            self._made = tuple(states.new_zeros(*states.shape[:2], SLOTS, states.shape[3]) for states in given)
        for buffer, states in zip(self._made, given, strict=True):
            buffer.scatter_(2, self._slots[:, None, :, None].expand_as(states), states)
        return self._made


class Attended:
    """Stands for transformers' attention functions; keeps the queries, keys and values, and returns zeros."""

    seen: tuple[Tensor, ...] = ()

    def get_interface(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return self._attend

    def _attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.seen = (query, key.clone(), value.clone())
        B, heads, n, _ = query.shape
        return query.new_zeros(B, n, heads, value.shape[-1]), None


def writes_agree(module: Any, children: dict[str, nn.Module], folded: bool, random: Random, joined: bool) -> bool:
    """Return whether `FusedAttention` hands the module's own queries, keys and values to the attention function.

    Args:
        module: the attention module.
        children: its modules for the fused one.
        folded: as for `FusedAttention`.
        random: random tensors.
        joined: as for `FusedAttention`; then the products may be rounded differently.
    """
    kind, B, n = type(module), 2, 3
    own, apply = kind.forward, with_globals(kind.forward).__globals__[ROTATE]
    angles = random(B, n, module.head_dim // 2).float().repeat(1, 1, 2)
    cos, sin = (turned.to(random(1).dtype) for turned in (angles.cos(), angles.sin()))
    slots = torch.tensor([[5, 0, 3], [1, 7, 2]], device=cos.device)

    def run(cache: Buffers, states: Tensor, fuse: bool) -> tuple[Tensor, ...]:
        attended = Attended()
        arguments = {"position_embeddings": (cos, sin), "attention_mask": None, CACHE: cache}
        if fuse:
            code = with_globals(own, **{ROTATE: rotate, ATTEND: attended})
            settings = {"code": code, "apply": apply, "folded": folded, "joined": joined}
            made = fused(module, FusedAttention, **settings, _modules=children)
            made.forward(states, **arguments)
        else:
            with_globals(own, **{ATTEND: attended})(module, states, **arguments)
        return attended.seen

    shapes, states = Buffers(slots), [random(B, n, module.config.hidden_size) for _ in range(2)]
    run(shapes, states[0], fuse=False)
    # First ours: memory that it forgets to write cannot hold the right values.
    ours, right = (run(shapes.cleared(), states[1], fuse) for fuse in (True, False))
    return len(ours) == 3 and all(map(close if joined else agree, ours, right))


def products_agree(ours: nn.Module, right: nn.Module, inputs: int, random: Random) -> bool:
    """Return whether two modules that multiply few rows give the same, up to the rounding of their products."""
    states = random(1, 8, inputs)
    return close(ours.forward(states), right.forward(states))
