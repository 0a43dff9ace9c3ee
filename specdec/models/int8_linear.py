"""Cheaper views of a draft model: fewer tokens in its LM head, 8-bit weights for passes over few tokens.

A draft need not be exact since it is verified. A view shares the model's weights and leaves the model unchanged.
"""

from __future__ import annotations

import logging
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.models.linear import FastLinear, Kernel, is_plain, product_in_blocks
from specdec.models.views import shallow_copy_as, view

log = logging.getLogger(__name__)

M = TypeVar("M", bound=nn.Module)
FEW_TOKENS = 4  # up to so many tokens the 8-bit product is the fastest (2 CPU cores, AVX-512 and AVX2)
INT8_PRODUCT = hasattr(torch, "_weight_int8pack_mm")  # an internal operator (torch 2.9 to 2.15)
NARROW = 2048  # outputs; for several rows and fewer outputs the original weights are faster on a GPU (H100)
ON_DEVICE = {"cpu": {torch.bfloat16, torch.float32}, "cuda": {torch.bfloat16, torch.float16}}  # dtypes of the model
VECTOR = 32  # torch's 8-bit product reads beyond the end of rows that are not a multiple of this (2.13, bfloat16)


class Int8Linear(FastLinear):
    """A linear layer that can also read its weights as int8, with one scale per output, where that is fastest.

    Decoding is bound by reading weights. For one token int8 takes 0.4 of bfloat16's time (896 x 4864, 2 CPU cores,
    AVX-512) and 0.3 of float32's (8960 x 1536, 2 CPU cores, AVX2). Passes over more tokens use the original weights,
    which are shared, not copied.
    """

    quantized: Tensor  # (out, in) int8
    scale: Tensor  # (out,) bfloat16

    @classmethod
    def of(cls, linear: nn.Linear) -> Int8Linear:
        """Quantise the weights of a linear layer."""
        layer, weight = shallow_copy_as(linear, cls), linear.weight.detach()
        layer.scale = (weight.float().abs().amax(1).clamp(min=1e-12) / 127).bfloat16()
        layer.quantized = (weight.float() / layer.scale.float()[:, None]).round().clamp(-127, 127).to(torch.int8)
        return layer

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        return (by_int8, *super().kernels) if INT8_PRODUCT else super().kernels


class GpuInt8Linear(Int8Linear):
    """An `Int8Linear` on a CUDA device: passes over few rows read the int8 weights (`models.kernels.int8_linear`)."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.numel() // x.shape[-1]
        narrow = rows > 1 and self.out_features < NARROW
        if narrow or not 0 < rows <= _gpu_kernels().ROWS or x.dtype not in ON_DEVICE["cuda"]:
            return nn.functional.linear(x, self.weight, self.bias)
        return self.multiplied(x.reshape(rows, -1)).view(*x.shape[:-1], -1)

    def multiplied(self, rows: Tensor) -> Tensor:
        """The product with rows (n, in) by the kernel."""
        return _gpu_kernels().int8_linear(rows, self.quantized, self.scale, self.bias)


@cache
def _gpu_kernels() -> Any:
    """The module of the GPU's kernels, which imports triton."""
    from specdec.models.kernels import int8_linear

    return int8_linear


class Int8Alone(Int8Linear):
    """An `Int8Linear` without the original weights: passes over many tokens read the int8 weights as well."""

    @classmethod
    def of(cls, linear: nn.Linear) -> Int8Alone:
        layer = super().of(linear)
        assert isinstance(layer, cls)
        nothing = nn.Parameter(linear.weight.detach().to("meta"), requires_grad=False)  # a shape and a type
        layer._parameters = {**linear._parameters, "weight": nothing}
        return layer

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        return (by_int8, by_int8_blocks, by_unpacked) if INT8_PRODUCT else (by_int8_blocks, by_unpacked)


def by_int8(rows: Tensor, layer: Int8Linear) -> Tensor:
    """Multiply rows (n, in) by the int8 weights in bfloat16: the float32 kernel is several times slower (AVX2)."""
    result = torch._weight_int8pack_mm(rows.bfloat16(), layer.quantized, layer.scale).to(rows.dtype)
    return result if layer.bias is None else result + layer.bias


def by_int8_blocks(rows: Tensor, layer: Int8Linear) -> Tensor:
    """Multiply rows (n, in) by the int8 weights in float32, converting a block of weights at a time."""
    result = (product_in_blocks(layer.quantized, rows) * layer.scale.float()[:, None]).T
    return (result if layer.bias is None else result + layer.bias).to(rows.dtype).contiguous()


def by_unpacked(rows: Tensor, layer: Int8Linear) -> Tensor:
    """Multiply rows (n, in) by weights that are dequantised for this product."""
    return nn.functional.linear(rows, layer.quantized.to(rows.dtype) * layer.scale[:, None], layer.bias)


def with_int8_linears(model: M, alone: bool = False) -> M:
    """A view of `model` with `Int8Linear` layers, which take one more byte per weight.

    Args:
        model: the model, which is not changed.
        alone: leave out original weights that no other layer shares, so that they are freed together with `model`. On
            CUDA they are kept.
    """
    shared = {
        id(weight)
        for module in model.modules()
        if type(module) is not nn.Linear
        for weight in module.parameters(recurse=False)
    }

    def swap(layer: nn.Module) -> nn.Module:
        if not is_plain(layer) or layer.in_features % VECTOR:
            return layer
        if layer.weight.is_cuda:
            return GpuInt8Linear.of(layer)
        return (Int8Alone if alone and id(layer.weight) not in shared else Int8Linear).of(layer)

    return view(model, swap)


def with_trimmed_head(model: PreTrainedModel, vocab: Tensor) -> PreTrainedModel:
    """A view of `model` whose LM head has only the tokens `vocab` (K,) int64, in that order.

    Raises:
        ValueError: the LM head is not a plain linear layer.
    """
    head = model.get_output_embeddings()
    if not is_plain(head):
        raise ValueError(
            f"cannot trim the vocabulary of {type(model).__name__}: its LM head is a {type(head).__name__}, not a "
            "linear layer, or its weights are quantised. Use vocab=None."
        )
    trimmed = nn.Linear(head.in_features, len(vocab), bias=head.bias is not None, device="meta")
    index = vocab.to(head.weight.device)
    trimmed.weight = nn.Parameter(head.weight.detach()[index].clone(), requires_grad=False)
    if head.bias is not None:
        trimmed.bias = nn.Parameter(head.bias.detach()[index].clone(), requires_grad=False)
    return view(model, lambda layer: trimmed if layer is head else layer)


def int8_pays(model: nn.Module) -> bool:
    """Return whether 8-bit decoding is available and worth its memory: with at least 10M parameters, on one device."""
    weights = list(model.parameters())
    if sum(weight.numel() for weight in weights) < 10_000_000:
        return False
    device = weights[0].device
    if any(weight.device != device or weight.dtype not in ON_DEVICE.get(device.type, ()) for weight in weights):
        return False
    return INT8_PRODUCT if device.type == "cpu" else _gpu_kernels_work(device)


@cache
def _gpu_kernels_work(device: torch.device) -> bool:
    """Return whether Triton is installed, compiles the kernels on this device, and gives the right product."""
    layer = nn.Linear(64, 32, device="meta")
    random = partial(torch.randn, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    for name, shape in (("weight", (32, 64)), ("bias", (32,))):
        setattr(layer, name, nn.Parameter(random(shape).to(device, torch.float16)))
    try:
        for rows in (1, 8):
            x = random((rows, 64)).to(device, torch.float16)
            ours, right = GpuInt8Linear.of(layer).multiplied(x), nn.functional.linear(x, layer.weight, layer.bias)
            if not torch.allclose(ours, right, atol=0.3):
                return False
    except Exception as failure:  # no Triton, no compiler, or an old device
        log.info("no 8-bit products on %s: %s", device, failure)
        return False
    return True
