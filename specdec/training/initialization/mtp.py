"""Initialization of fresh MTP layers from the target's last attention layer."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.heads.mtp.checkpoint import EMBED_NORM, FUSE, NORM, STATE_NORM, MtpTensors
from specdec.heads.mtp.loading import build_layer, last_norm
from specdec.heads.mtp.trainable import MtpTrainee
from specdec.models.introspection import FULL, RECURRENT, decoder_layers, layer_kinds


@torch.no_grad()
def initialize_mtp(target: PreTrainedModel, draft_vocab: Tensor, count: int = 1) -> MtpTrainee:
    """Create fresh MTP layers.

    Args:
        target: model to draft for.
        draft_vocab: (K,) int64, tokens whose drafts are trained on.
        count: number of layers, applied one after the other.

    Raises:
        ValueError: The target's layers are quantised, or all of them are recurrent.
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
    fuse = torch.eye(H, dtype=target.dtype).repeat(1, 2) / 2  # mean of embedding and state
    own: dict[str, Any] = {EMBED_NORM: neutral, STATE_NORM: neutral, FUSE: fuse, NORM: norm.weight}
    tensors = MtpTensors(own, [block])
    return MtpTrainee([build_layer(target, copy.deepcopy(tensors), index) for index in range(count)], draft_vocab)


def _last_attending(target: PreTrainedModel) -> nn.Module:
    """Return the last layer with full attention, or else the last with any attention."""
    layers = decoder_layers(target)
    kinds = layer_kinds(target.config.get_text_config(decoder=True)) or [FULL] * len(layers)
    attending = [i for i, kind in enumerate(kinds) if kind not in RECURRENT]
    if not attending:
        raise ValueError(
            f"{type(target).__name__} has no attention layer to make MTP layers from: choose another --kind"
        )
    return layers[max([i for i in attending if kinds[i] == FULL] or attending)]


def _neutral(norm: nn.Module) -> Tensor:
    """Return the weight (H,) with which a norm of this class only normalizes: some multiply by 1 + weight."""
    candidate = copy.deepcopy(norm)
    weight: Tensor = candidate.weight  # type: ignore[assignment]
    unit = torch.ones_like(weight)
    for value in (1.0, 0.0):
        weight.fill_(value)
        if torch.allclose(candidate(unit), unit, atol=0.05):
            return weight.detach()
    raise ValueError(
        f"{type(norm).__name__} normalizes with weights of neither 1 nor 0, which is not supported: give --from"
    )
