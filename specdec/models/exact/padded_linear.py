"""`PaddedLinear`: a linear layer on a CPU that multiplies a single row as one of several equal ones.

CPU libraries have a kernel of their own for products over one row, which adds in another order than the one for several
rows. Products over several rows mostly give each of them the same bits, however many there are. So a row that is padded
to two has the bits that it has in a draft. In bfloat16 it takes no longer, since either product is bound by reading the
weights.
Whether this holds depends on the library, the processor, the shape and the dtype. It is found out by comparing.
"""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor, nn

from specdec.models.exact.linear import exact_kernel, is_whole
from specdec.models.exact.row_linear import RowLinear
from specdec.models.linear import is_plain
from specdec.models.views import view

M = TypeVar("M", bound=nn.Module)

SIZES = (1, 2, 4, 8)  # rows that a single one is padded to: the smallest that gives the bits of the most rows
TRIED = (2, 3, 8), (2, 3, 4), (2,)  # numbers of rows that a size has to suit; others are tried when they are needed


class PaddedLinear(RowLinear):
    """A linear layer whose single rows are padded. size: to so many rows."""

    size: int

    def product(self, rows: Tensor) -> Tensor:
        multiply = exact_kernel(self.weight, self.bias, 1, len(rows), self.size)
        return multiply(rows[None], self.weight, self.bias)[0]


def with_padded_linears(model: M) -> M:
    """A view of `model` with `PaddedLinear` for layers whose rows have the same bits in any product but that of one."""

    def swap(module: nn.Module) -> nn.Module:
        if not is_plain(module) or module.weight.device.type != "cpu":
            return module
        size = padded_size(module.weight, module.bias)
        return module if size == 1 else PaddedLinear.of(module, size=size)

    return view(model, swap)


def padded_size(weight: Tensor, bias: Tensor | None) -> int:
    """Number of rows to pad a single row to; 1 if that is not needed or does not help."""

    def suits(size: int, numbers: tuple[int, ...]) -> bool:
        return all(is_whole(exact_kernel(weight, bias, 1, rows, size)) for rows in numbers)

    return next((size for numbers in TRIED for size in SIZES if suits(size, numbers)), 1)
