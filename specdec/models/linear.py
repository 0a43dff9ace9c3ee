"""`with_fast_linears`: a view of a model whose linear layers use the fastest matrix product kernel on this machine.

Decoding multiplies few rows by large weights, and CPU libraries differ in how well they do that. Without AVX-512
torch's `linear` takes twice as long for two rows as for one in float32, and n times as long for n rows in bfloat16.
The kernels are autotuned for each number of rows while the model runs. They round sums differently, as torch's own
kernels for different numbers of rows do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from time import perf_counter
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from specdec.models.views import shallow_copy_as, view
from specdec.utils.timing import lose

M = TypeVar("M", bound=nn.Module)
Kernel = Callable[[Tensor, Any], Tensor]  # rows (n, in) and the layer: (n, out)

SMALLEST = 2**16  # entries of the smallest weight whose kernel is autotuned
MANY = 64  # rows; more use the kernel that is fastest for this many
LONG = 2**11  # outputs; longer layers with the same inputs share a result, so that no kernel is timed on an LM head
TRIES = 5  # measurements per kernel; the fastest counts
HOPELESS = 2.0  # a kernel that twice takes this many times the fastest's time is not measured again
BLOCK = 2**18  # weights converted to float32 at a time, which fit into the processor's cache


def with_fast_linears(model: M) -> M:
    """A view of `model` with `FastLinear` for its large linear layers on CPUs; `model` itself if it has none."""
    return view(model, lambda layer: shallow_copy_as(layer, FastLinear) if _matters(layer) else layer)


class FastLinear(nn.Linear):
    """A linear layer for inference with an autotuned kernel. Shares the parameters of the layer it is made from."""

    _settled: Mapping[tuple[torch.Size, int], Kernel] = {}  # fastest kernel by input shape and number of threads

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """Kernels for this layer's weights."""
        return kernels(self.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        settled_by = x.shape, torch.get_num_threads()
        kernel = self._settled.get(settled_by)
        if kernel is by_rows:  # torch's own takes any x; the checks below cost 4% of a pass over all layers
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
        """The fastest kernel for this number of rows (n, in); the autotuner while it is not known."""
        autotuner = self._autotuner(min(len(rows), MANY))
        while autotuner.best is None and len(rows) > MANY:
            autotuner(rows[:MANY], self)
        return autotuner.best or autotuner

    def _autotuner(self, rows: int) -> Autotuner:
        out, into = self.weight.shape
        likes = (self.kernels, into, min(out, LONG), (rows - 1).bit_length(), torch.get_num_threads())
        return _autotuners.get(likes) or _autotuners.setdefault(likes, Autotuner(self.kernels))


class Autotuner:
    """Finds the fastest kernel by using each in turn for products that are needed anyway."""

    def __init__(self, kernels: Sequence[Kernel]):
        self.best: Kernel | None = None
        self._waiting = list(kernels) * TRIES
        self._seconds: dict[Kernel, list[float]] = {}  # per output

    def __call__(self, rows: Tensor, layer: nn.Linear) -> Tensor:
        kernel = self._waiting.pop(0) if self._waiting else by_rows  # empty if another thread took the last one
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


_autotuners: dict[tuple[object, ...], Autotuner] = {}  # results of this process


def is_plain(layer: nn.Module | None) -> TypeGuard[nn.Linear]:
    """Return whether a layer is torch's own linear layer with an ordinary weight tensor.

    Quantised layers have a class of their own (bitsandbytes), or weights of a tensor subclass (torchao).
    """
    return type(layer) is nn.Linear and not is_traceable_wrapper_subclass(layer.weight)


def _matters(layer: nn.Module) -> bool:
    """Return whether autotuning a layer is worthwhile: it is large, on a CPU, and has several kernels."""
    if not is_plain(layer):
        return False
    weight = layer.weight
    return weight.device.type == "cpu" and weight.numel() >= SMALLEST and len(kernels(weight.dtype)) > 1


@cache
def kernels(dtype: torch.dtype) -> tuple[Kernel, ...]:
    """Kernels for weights of a dtype."""
    if dtype == torch.float32:
        return (by_rows, by_columns, by_onednn) if _onednn_works() else (by_rows, by_columns)
    return (by_rows, by_blocks) if dtype in (torch.bfloat16, torch.float16) else (by_rows,)


def by_rows(rows: Tensor, layer: nn.Linear) -> Tensor:
    """Torch's `linear`."""
    return nn.functional.linear(rows, layer.weight, layer.bias)


def by_columns(rows: Tensor, layer: nn.Linear) -> Tensor:
    """The transposed product: with few columns instead of few rows MKL takes half the time (AVX2)."""
    result = (layer.weight @ rows.T).T
    return (result if layer.bias is None else result + layer.bias).contiguous()


def by_onednn(rows: Tensor, layer: nn.Linear) -> Tensor:
    """oneDNN's product, where torch uses MKL's, without repacking the weights: half the time for one row (AVX2)."""
    return torch.ops.mkldnn._linear_pointwise(rows, layer.weight, layer.bias, "none", [], "")


def by_blocks(rows: Tensor, layer: nn.Linear) -> Tensor:
    """The product in float32, converting a block of weights at a time, for processors that only emulate their dtype."""
    result = product_in_blocks(layer.weight, rows)
    return (result.T if layer.bias is None else result.T + layer.bias).to(rows.dtype).contiguous()


def product_in_blocks(weight: Tensor, rows: Tensor) -> Tensor:
    """(out, n) float32, the product of a weight (out, in) of any dtype and rows (n, in), a block at a time."""
    out, into = weight.shape
    columns, height = rows.float().T.contiguous(), max(16, BLOCK // into)
    empty = partial(torch.empty, dtype=torch.float32, device=rows.device)
    block, result = empty(height, into), empty(out, len(rows))
    for start in range(0, out, height):
        part = weight[start : start + height]
        torch.mm(block[: len(part)].copy_(part), columns, out=result[start : start + height])
    return result


def _onednn_works() -> bool:
    """Return whether torch's internal oneDNN operator (2.9 to 2.15) computes a small product correctly."""
    # On "meta", since initialising weights would draw from the generator that calls sample with.
    layer, made = nn.Linear(3, 2, device="meta"), partial(torch.tensor, dtype=torch.float32, device="cpu")
    rows = made([[1.0, 1.0, 1.0]] * 2)
    layer.weight = nn.Parameter(made([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]))
    layer.bias = nn.Parameter(made([1.0, -1.0]))
    try:
        return torch.allclose(by_onednn(rows, layer), layer(rows))
    except (AttributeError, RuntimeError):
        return False
