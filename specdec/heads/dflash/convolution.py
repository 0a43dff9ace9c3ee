"""`ConvolvedLayer` of DFlash 2: a decoder layer with short convolutions over the tokens of its block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import Cache

from specdec.heads.config import LayerConfig
from specdec.heads.layers import DecoderLayer, Visible


@dataclass(frozen=True)
class ConvolutionShape:
    """Shape of a `BlockConvolution`.

    Attributes:
        kernel_size: tokens that one output reads: its own and those before it in the block.
        group_size: channels that share the part of the kernel which depends on the token.
    """

    kernel_size: int
    group_size: int


class BlockConvolution(nn.Module):
    """Two causal depthwise convolutions, before and after a part of a layer. No token reads beyond its own block.

    Both kernels are the sum of a fixed one per channel, and of one per group that is computed from the first input.

    Args:
        shape: size of the kernels.
        hidden_size: H.
        block_size: tokens per block.
    """

    def __init__(self, shape: ConvolutionShape, hidden_size: int, block_size: int):
        super().__init__()
        self.shape, self.block_size = shape, block_size
        groups = hidden_size // shape.group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, shape.kernel_size, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * shape.kernel_size * groups, bias=False)
        with torch.no_grad():
            self.base_kernel[:, 0] = 1.0

    def kernels(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return both kernels (B, n, kernel_size, H) for the input x (B, n, H) of the first convolution."""
        dynamic = self.kernel_projection(x).unflatten(-1, (2, self.shape.kernel_size, -1))
        before, after = (self.base_kernel + dynamic.repeat_interleave(self.shape.group_size, -1)).unbind(-3)
        return before, after

    def forward(self, x: Tensor, kernel: Tensor) -> Tensor:
        """Convolve x (B, n, H), n a multiple of the block's size, with a kernel for each of its tokens."""
        blocks = x.unflatten(1, (-1, self.block_size))
        padded = nn.functional.pad(blocks, (0, 0, self.shape.kernel_size - 1, 0))
        earlier = padded.unfold(2, self.shape.kernel_size, 1).flip(-1)  # (B, blocks, tokens, H, kernel_size)
        return (earlier.flatten(1, 2).transpose(-1, -2) * kernel).sum(-2)


class ConvolvedLayer(DecoderLayer):
    """Decoder layer with a `BlockConvolution` around the attention and around the MLP."""

    def __init__(self, config: LayerConfig, index: int, shape: ConvolutionShape, block_size: int):
        super().__init__(config, index)
        self.attention_conv = BlockConvolution(shape, config.hidden_size, block_size)
        self.mlp_conv = BlockConvolution(shape, config.hidden_size, block_size)

    def forward(self, h: Tensor, rotation: tuple[Tensor, Tensor], visible: Visible, cache: Cache | None) -> Tensor:
        assert self.input_layernorm is not None
        x = self.input_layernorm(h)
        before, after = self.attention_conv.kernels(x)
        attended = self.self_attn(self.attention_conv(x, before), rotation, visible, cache)
        h = h + self.attention_conv(attended, after)
        x = self.post_attention_layernorm(h)
        before, after = self.mlp_conv.kernels(x)
        return h + self.mlp_conv(self.mlp(self.mlp_conv(x, before)), after)
