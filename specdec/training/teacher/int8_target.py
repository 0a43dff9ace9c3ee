"""View of a target that multiplies in int8, for CPUs on which int8 products are faster than float products.

With AVX-512's byte products (VNNI) and without AMX, torch multiplies bytes three times as fast as float32 and five
times as fast as bfloat16. The states have some noise, which is acceptable for training but not for decoding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.models.views import shallow_copy_as, view

CLOSE = 0.02  # largest relative error of a layer's product in the median row


class ByteLinear(nn.Linear):
    """Linear layer for inference whose weights and input rows are rounded to int8.

    Attributes:
        quantized: (out, in) int8, rounded weights.
        scale: (out,) float32, scale of each weight row.
        twice: also multiply the rounding error of each input row. This helps rows with a few entries far larger than
            all others, such as the input of an MLP's last matrix.
    """

    quantized: Tensor
    scale: Tensor
    twice = False

    @classmethod
    def of(cls, linear: nn.Linear) -> ByteLinear:
        layer = shallow_copy_as(linear, cls)
        layer.quantized, layer.scale = _rounded(linear.weight.detach().float())
        return layer

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).float()
        out = self._product(*(rounded := _rounded(rows)))
        if self.twice:
            out += self._product(*_rounded(rows - rounded[0] * rounded[1][:, None]))
        out.mul_(self.scale)
        if self.bias is not None:
            out += self.bias
        return out.view(*x.shape[:-1], -1).to(x.dtype)

    def _product(self, rows: Tensor, scale: Tensor) -> Tensor:
        """Multiply rows (n, in) int8 with scales (n,) by the weights, (n, out) float32."""
        if hasattr(torch, "_int_mm"):  # an internal operator (2.9 to 2.15)
            return torch._int_mm(rows, self.quantized.T).float().mul_(scale[:, None])
        return (rows.float() @ self.quantized.T.float()).mul_(scale[:, None])


def _rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows (n, in) to int8, and return them with the scale (n,) of each."""
    scale = rows.abs().amax(1).clamp(min=1e-12) / 127
    return (rows / scale[:, None]).round_().to(torch.int8), scale


@torch.no_grad()
def with_int8_decoder(target: PreTrainedModel, ids: Tensor) -> PreTrainedModel:
    """Return a view of `target` whose decoder multiplies in int8.

    Args:
        target: model on a CPU.
        ids: (T,) int64, a text. Layers whose relative error on it exceeds `CLOSE` round their rows twice.

    Raises:
        ValueError: The target is not on a CPU.
    """
    if target.device.type != "cpu":
        raise ValueError(
            "states are computed in 8 bits on CPUs only, other devices are faster without: leave out --rounded-states"
        )
    decoder = target.get_decoder()
    rounded: dict[nn.Module, ByteLinear] = {
        layer: ByteLinear.of(layer) for layer in decoder.modules() if type(layer) is nn.Linear
    }

    def compare(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        error = (rounded[layer](inputs[0]) - output).norm(dim=-1) / output.norm(dim=-1)
        rounded[layer].twice |= bool(error.median() > CLOSE)

    hooks = [layer.register_forward_hook(compare) for layer in rounded]
    try:
        decoder(input_ids=ids[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return view(target, lambda module: rounded.get(module, module))
