"""`with_fast_linears`: a view of a model whose linear layers multiply in whichever way is fastest on this machine.

Owns the ways to multiply, and finding out by the clock, while the model works, which is best for how many rows.
Decoding multiplies few rows by large weights, and CPUs differ in how well their libraries do that: without AVX-512
torch's `linear` takes twice as long for two rows as for one in float32, and n times as long for n in bfloat16. The ways
differ in how sums are rounded, as torch's own for different numbers of rows do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from time import perf_counter
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from specdec.models.views import shallow_copy_as, view
from specdec.utils.timing import lose

M = TypeVar("M", bound=nn.Module)
Kernel = Callable[[Tensor, Any], Tensor]  # rows (n, in) and the layer: (n, out)

SMALLEST = 2**16  # numbers in a weight from which on it matters how it is multiplied
MANY = 64  # rows; more are multiplied in the way that is best for so many
LONG = 2**11  # outputs; longer matrices with as many inputs are taken for alike: none is tried on an LM head
TRIES = 5  # of each way; its fastest counts
HOPELESS = 2.0  # times the fastest: a way that takes so long, twice, is not tried again
BLOCK = 2**18  # numbers converted to float32 at a time: they stay in the processor's cache


def with_fast_linears(model: M) -> M:
    """A view of `model` with `FastLinear` in place of its large linear layers on CPUs; without any, `model` itself."""
    return view(model, lambda layer: shallow_copy_as(layer, FastLinear) if _matters(layer) else layer)


class FastLinear(nn.Linear):
    """A linear layer for inference, made of one whose parameters it shares."""

    _settled: Mapping[tuple[torch.Size, int], Kernel] = {}  # what is best for rows of a shape, by so many threads

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """To multiply by its weights."""
        return kernels(self.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        settled_by = x.shape, torch.get_num_threads()
        kernel = self._settled.get(settled_by)
        if kernel is by_rows:  # torch's own takes whatever x is; asking on cost 4% of a pass, over all layers
            return nn.functional.linear(x, self.weight, self.bias)
        if x.dtype != self.weight.dtype or torch.is_grad_enabled() or not x.numel():
            return super().forward(x)
        rows = x.reshape(-1, x.shape[-1])
        if kernel is None:
            kernel = self._best(rows)
            if (
                not isinstance(kernel, Autotuner) and len(rows) <= MANY
            ):  # prompts have too many shapes to remember them all
                self._settled = {**self._settled, settled_by: kernel}
        return kernel(rows, self).view(*x.shape[:-1], -1)

    def _best(self, rows: Tensor) -> Kernel:
        """What is best for so many rows (n, in); the trial, while that is not known."""
        autotuner = self._autotuner(min(len(rows), MANY))
        while autotuner.best is None and len(rows) > MANY:
            autotuner(rows[:MANY], self)
        return autotuner.best or autotuner

    def _autotuner(self, rows: int) -> Autotuner:
        out, into = self.weight.shape
        likes = (self.kernels, into, min(out, LONG), (rows - 1).bit_length(), torch.get_num_threads())
        return _autotuners.get(likes) or _autotuners.setdefault(likes, Autotuner(self.kernels))


class Autotuner:
    """Ways take turns at products that are needed anyway until the best is known."""

    def __init__(self, kernels: Sequence[Kernel]):
        self.best: Kernel | None = None
        self._waiting = list(kernels) * TRIES
        self._seconds: dict[Kernel, list[float]] = {}  # per output

    def __call__(self, rows: Tensor, layer: nn.Linear) -> Tensor:
        kernel = self._waiting.pop(0) if self._waiting else by_rows  # none: another thread took the last
        start = perf_counter()
        result = kernel(rows, layer)
        self._book(kernel, perf_counter() - start, layer.out_features)
        return result

    def _book(self, kernel: Kernel, taken: float, outputs: int) -> None:
        seconds = taken / outputs
        self._seconds.setdefault(kernel, []).append(seconds)
        least = {kernel: min(taken) for kernel, taken in self._seconds.items()}
        best = min(least, key=least.__getitem__)
        lose(taken - outputs * least[best])
        hopeless = [
            kernel for kernel in least if least[kernel] > HOPELESS * least[best] and len(self._seconds[kernel]) > 1
        ]
        self._waiting = [kernel for kernel in self._waiting if kernel not in hopeless]
        if not self._waiting:
            self.best = best


_autotuners: dict[tuple[object, ...], Autotuner] = {}  # what this process has found


def is_plain(layer: nn.Module | None) -> TypeGuard[nn.Linear]:
    """Whether it is torch's own linear layer, and its weights are numbers.

    Where they are quantised, the layer is of a class of its own (bitsandbytes) or its weights are made of several
    tensors (torchao), which know the operators that their library has given them.
    """
    return type(layer) is nn.Linear and not is_traceable_wrapper_subclass(layer.weight)


def _matters(layer: nn.Module) -> bool:
    if not is_plain(layer):
        return False
    weight = layer.weight
    return weight.device.type == "cpu" and weight.numel() >= SMALLEST and len(kernels(weight.dtype)) > 1


@cache
def kernels(dtype: torch.dtype) -> tuple[Kernel, ...]:
    """To multiply by weights of this type."""
    if dtype == torch.float32:
        return (by_rows, by_columns, by_onednn) if _onednn_works() else (by_rows, by_columns)
    return (by_rows, by_blocks) if dtype in (torch.bfloat16, torch.float16) else (by_rows,)


def by_rows(rows: Tensor, layer: nn.Linear) -> Tensor:
    """As torch does it."""
    return nn.functional.linear(rows, layer.weight, layer.bias)


def by_columns(rows: Tensor, layer: nn.Linear) -> Tensor:
    """The other way round: with few columns instead of few rows MKL takes half the time (AVX2)."""
    result = (layer.weight @ rows.T).T
    return (result if layer.bias is None else result + layer.bias).contiguous()


def by_onednn(rows: Tensor, layer: nn.Linear) -> Tensor:
    """oneDNN's product where torch takes MKL's, on the weights as they are: half the time for a single row (AVX2)."""
    return torch.ops.mkldnn._linear_pointwise(rows, layer.weight, layer.bias, "none", [], "")


def by_blocks(rows: Tensor, layer: nn.Linear) -> Tensor:
    """In float32, the weights converted a block at a time: for processors that do not multiply their type."""
    result = product_in_blocks(layer.weight, rows)
    return (result.T if layer.bias is None else result.T + layer.bias).to(rows.dtype).contiguous()


def product_in_blocks(weight: Tensor, rows: Tensor) -> Tensor:
    """(out, n) float32 of a weight (out, in) of any type and rows (n, in)."""
    out, into = weight.shape
    columns, height = rows.float().T.contiguous(), max(16, BLOCK // into)
    block, result = torch.empty(height, into), torch.empty(out, len(rows))
    for start in range(0, out, height):
        part = weight[start : start + height]
        torch.mm(block[: len(part)].copy_(part), columns, out=result[start : start + height])
    return result


def _onednn_works() -> bool:
    """Its operator is torch's own affair (2.9 to 2.15 have it): asked for one product before it is relied on."""
    # On "meta": a layer that is initialised elsewhere draws from the generator that calls sample with.
    layer, rows = nn.Linear(3, 2, device="meta"), torch.ones(2, 3)
    layer.weight = nn.Parameter(torch.arange(6.0).view(2, 3))
    layer.bias = nn.Parameter(torch.tensor([1.0, -1.0]))
    try:
        return torch.allclose(by_onednn(rows, layer), layer(rows))
    except (AttributeError, RuntimeError):
        return False
