"""`RowLinear`: a linear layer that computes each row with the same arithmetic, however many rows a pass has."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, TypeVar

from torch import Tensor, nn

from specdec.models.views import shallow_copy_as

L = TypeVar("L", bound="RowLinear")
ROWS = 64  # rows of a pass over single tokens at most


class RowLinear(nn.Linear):
    """Base class of such layers. They share the parameters of the layer that they are made from.

    Prompts run torch's product: plain decoding and exact calls read them in the same passes.

    Attributes:
        most: rows of a pass at most, more are a prompt; None for passes over draft nodes.
    """

    most: int | None = ROWS

    @classmethod
    def of(cls: type[L], layer: nn.Linear, **attributes: Any) -> L:
        """The row-independent form of a layer."""
        made = shallow_copy_as(layer, cls)
        vars(made).update(attributes)
        return made

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        prompt = self.most is not None and (len(rows) > self.most or (x.dim() == 3 and x.shape[1] > 1))
        if prompt or not len(rows):
            return super().forward(x)
        return self.product(rows).view(*x.shape[:-1], -1)

    @abstractmethod
    def product(self, rows: Tensor) -> Tensor:
        """The product of rows (M, in) with the weights, (M, out)."""
