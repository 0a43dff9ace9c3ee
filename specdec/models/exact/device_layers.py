"""`with_device_layers`: a view of a model on a device whose layers run Triton kernels with fixed tiles and splits.

torch chooses its kernels by the number of rows. Its products do, and so do its sums over a row (ATen's Reduce.cuh
divides threads between rows), which norms are made of. Elementwise functions, embeddings and rotations compute a row
on its own. A module that nothing here replaces is found by the probe of `exactness` if its results depend on the pass.
"""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor, nn
from torch.nn.functional import linear

from specdec.models.exact.device_attention import with_row_attention
from specdec.models.exact.row_linear import RowLinear
from specdec.models.few_row_layers import parameters
from specdec.models.fused_modules import FusedNorm
from specdec.models.fuser import Fuser
from specdec.models.introspection import device_of
from specdec.models.kernels.few_rows import DOWN, OUT, QKV, TILES, joined_linear, takes
from specdec.models.linear import is_plain
from specdec.models.views import view

M = TypeVar("M", bound=nn.Module)


class KernelLinear(RowLinear):
    """A linear layer with the kernel of `joined_linear`. Its tiles depend on the layer's shape alone."""

    def product(self, rows: Tensor) -> Tensor:
        weights, biases = parameters(self)
        if not takes(rows, weights, biases, rows=None):
            return linear(rows, self.weight, self.bias)
        outputs, inputs = self.weight.shape
        use = QKV if outputs > inputs else OUT if outputs == inputs else DOWN
        (result,) = joined_linear(rows, weights, biases, TILES[use])
        return result


def with_device_layers(model: M) -> M:
    """A view of `model` with kernels for linear layers, RMSNorms and attention; `model` itself if it has them."""
    fuser = Fuser(model.dtype, device_of(model))  # type: ignore[arg-type]

    def swap(module: nn.Module) -> nn.Module:
        if is_plain(module):
            return KernelLinear.of(module)
        return module if isinstance(module, FusedNorm) else fuser.norm(module) or module

    return view(view(model, swap), with_row_attention)
