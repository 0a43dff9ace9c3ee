"""`initialize_mtp`: fresh MTP layers for a target, which start out as its own last layer."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.heads.mtp.checkpoint import EMBED_NORM, FUSE, NORM, STATE_NORM, MtpTensors
from specdec.heads.mtp.loading import last_norm, made
from specdec.heads.mtp.trainable import MtpTrainee
from specdec.models.introspection import FULL, RECURRENT, decoder_layers, layer_kinds


@torch.no_grad()
def initialize_mtp(target: PreTrainedModel, draft_vocab: Tensor, count: int = 1) -> MtpTrainee:
    """Fresh layers.

    Args:
        draft_vocab: (K,) int64, the tokens whose drafts are to be learnt from. count: of layers, one behind the other.

    Raises:
        ValueError: the target's own layers are no start: recurrent all of them, or quantised.
    """
    block = _last_attending(target).state_dict()
    if not all(tensor.is_floating_point() for tensor in block.values()):
        raise ValueError(
            f"the layers of {type(target).__name__} are quantised, and MTP layers cannot start from them: train them "
            "for the target before it is quantised, or give --from"
        )
    _, norm = last_norm(target)
    H = len(norm.weight)  # type: ignore[arg-type]
    neutral = _neutral(norm)
    fuse = torch.eye(H, dtype=target.dtype).repeat(1, 2) / 2  # the mean of embedding and state
    own: dict[str, Any] = {EMBED_NORM: neutral, STATE_NORM: neutral, FUSE: fuse, NORM: norm.weight}
    tensors = MtpTensors(own, [block])
    return MtpTrainee([made(target, copy.deepcopy(tensors), index) for index in range(count)], draft_vocab)


def _last_attending(target: PreTrainedModel) -> nn.Module:
    """The last layer with full attention, else the last with any."""
    layers = decoder_layers(target)
    kinds = layer_kinds(target.config.get_text_config(decoder=True)) or [FULL] * len(layers)
    attending = [i for i, kind in enumerate(kinds) if kind not in RECURRENT]
    if not attending:
        raise ValueError(f"{type(target).__name__} has no attention, of which MTP layers are made")
    return layers[max([i for i in attending if kinds[i] == FULL] or attending)]


def _neutral(norm: nn.Module) -> Tensor:
    """(H,) weight with which a norm like this one only norms: some multiply by 1 + weight."""
    candidate = copy.deepcopy(norm)
    weight: Tensor = candidate.weight  # type: ignore[assignment]
    unit = torch.ones_like(weight)
    for value in (1.0, 0.0):
        weight.fill_(value)
        if torch.allclose(candidate(unit), unit, atol=0.05):
            return weight.detach()
    raise ValueError(f"it is not known how to make a neutral {type(norm).__name__}")
