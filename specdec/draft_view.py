"""Cheaper views of a draft model: fewer tokens in its LM head, 8-bit weights while it decodes.

A draft need not be exact, it is verified; a view shares the model's weights and leaves the model itself as it was.
"""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

M = TypeVar("M", bound=nn.Module)
FEW_TOKENS = 4  # up to here the 8-bit product is the faster one (2 CPU cores, AVX-512)


class Int8Linear(nn.Module):
    """A linear layer whose weights are read as int8, one scale per output, for passes over few tokens.

    Decoding is bound by reading weights: half the bytes take 0.4 of the time for one token (896 x 4864, 2 CPU cores).
    Passes over more tokens go through the original layer, whose weights are shared, not copied.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        weight = linear.weight.detach()
        scale = weight.float().abs().amax(1).clamp(min=1e-12) / 127
        self.linear = linear
        self.quantized = (weight.float() / scale[:, None]).round().to(torch.int8)  # (out, in)
        self.scale = scale.to(weight.dtype)  # (out,)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if len(rows) > FEW_TOKENS:
            return self.linear(x)
        y = torch._weight_int8pack_mm(rows, self.quantized, self.scale)
        if self.linear.bias is not None:
            y = y + self.linear.bias
        return y.view(*x.shape[:-1], -1)


def with_int8_linears(model: M) -> M:
    """A view of `model` with `Int8Linear` in place of its linear layers: half a copy of its weights on top."""
    view = share(model)
    for module in list(view.modules()):
        for name, child in list(module._modules.items()):
            if type(child) is nn.Linear:
                module._modules[name] = Int8Linear(child)
    return view


def with_trimmed_head(model: PreTrainedModel, vocab: Tensor) -> PreTrainedModel:
    """A view of `model` whose LM head knows only the tokens `vocab` (K,) int64, in that order."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ValueError(
            f"cannot trim the vocabulary of {type(model).__name__}: its LM head is a {type(head).__name__}, not a "
            "linear layer. Use vocab=None."
        )
    trimmed = nn.Linear(head.in_features, len(vocab), bias=head.bias is not None, device="meta")
    index = vocab.to(head.weight.device)
    trimmed.weight = nn.Parameter(head.weight.detach()[index].clone(), requires_grad=False)
    if head.bias is not None:
        trimmed.bias = nn.Parameter(head.bias.detach()[index].clone(), requires_grad=False)
    view = share(model)
    view.set_output_embeddings(trimmed)
    return view


def int8_pays(model: nn.Module) -> bool:
    """Whether 8-bit decoding is to be had and worth its memory: bfloat16 on a CPU, 10M parameters or more."""
    weights = list(model.parameters())
    return (
        hasattr(torch, "_weight_int8pack_mm")
        and all(weight.device.type == "cpu" and weight.dtype == torch.bfloat16 for weight in weights)
        and sum(weight.numel() for weight in weights) >= 10_000_000
    )


def share(model: M) -> M:
    """A copy of the model's structure around the very same parameters and buffers."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
