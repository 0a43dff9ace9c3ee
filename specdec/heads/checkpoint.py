"""Tensors of a head's checkpoint: names, shapes and vocabulary are checked, then the head is filled with them.

Shared by every kind of head and every layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from specdec.heads.config import LayerConfig
from specdec.heads.config_fields import Field

M = TypeVar("M", bound=nn.Module)
# Beginnings of names, and what they are in ours.
RENAMED = {"midlayer.": "layers.0.", "encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
# Ends of names of tensors whose shapes tell what a head is built of.
MATRICES = ("fc.weight", "lm_head.weight", "embed_tokens.weight", "proj.weight", "markov_w1.weight")
VECTORS = ("norm.weight", "d2t")
# Names that carry nothing a head computes with.
IGNORED = {
    "t2d": "the inverse of d2t",
    "rotary_emb.inv_freq": "computed from the config",
    "verifier_lm_head.weight": "the target's own",
    "verifier_norm.weight": "the target's own",
}


@dataclass(frozen=True)
class Understood:
    """A checkpoint as it was understood.

    Attributes:
        format: whose layout it is. fields: what is known of the head, and how.
        used: its names of the tensors in use. ignored: those left out, with the reason. weights: by our names.
    """

    path: Path
    format: str
    config: LayerConfig
    fields: tuple[Field, ...]
    used: dict[str, tuple[int, ...]]
    ignored: dict[str, str]
    weights: dict[str, Tensor]

    @property
    def borrowed(self) -> list[str]:
        """Tensors that the target lends."""
        return [] if self.config.own_embedding else ["embed_tokens.weight"]


def filled(head: M, weights: Mapping[str, Tensor], path: Path) -> M:
    """A head on the meta device with these weights: each of its own, and no other."""
    state = head.state_dict()
    expected = {name: tuple(tensor.shape) for name, tensor in state.items()}
    missing = sorted(expected.keys() - weights.keys())
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}")
    unplaced = sorted(weights.keys() - expected.keys())
    if unplaced:
        raise ValueError(f"{path} holds {', '.join(unplaced)}, which this kind of head has no place for")
    for name, tensor in weights.items():
        if tuple(tensor.shape) != expected[name]:
            raise ValueError(
                f"{path}: {name} has shape {tuple(tensor.shape)}, its config and the other weights ask for "
                f"{expected[name]}"
            )
        if tensor.is_floating_point() != state[name].is_floating_point():
            wanted = "floating-point numbers" if state[name].is_floating_point() else "whole numbers"
            raise ValueError(f"{path}: {name} holds {tensor.dtype}, {wanted} were expected: the file is damaged")
    dtype = weights["fc.weight" if "fc.weight" in weights else min(weights)].dtype
    head.load_state_dict(
        {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in weights.items()},
        assign=True,
    )
    return head.requires_grad_(False).eval()


def placed(
    tensors: Mapping[str, Tensor], folder: Path
) -> tuple[dict[str, Tensor], dict[str, tuple[int, ...]], dict[str, str]]:
    """What a file's tensors are to us: those in use, by our names; these by the file's; those left out, and why."""
    weights: dict[str, Tensor] = {}
    used: dict[str, tuple[int, ...]] = {}
    ignored: dict[str, str] = {}
    for name, tensor in tensors.items():
        plain = name.removeprefix("model.")
        reason = next((why for end, why in IGNORED.items() if plain == end or plain.endswith("." + end)), None)
        if plain.endswith("self_attn.o_proj.bias") and not bool(tensor.any()):
            reason = "zeros, for engines that expect it"
        if reason:
            ignored[name] = reason
            continue
        first = next((theirs for theirs in RENAMED if plain.startswith(theirs)), "")
        ours = RENAMED.get(first, "") + plain.removeprefix(first)
        if ours in weights:
            raise ValueError(f"{folder}: two tensors are {ours}: {name} and another")
        weights[ours] = tensor
        used[name] = tuple(tensor.shape)
    check_shapes(folder, weights)
    return weights, used, ignored


def check_shapes(folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Raise ValueError for a tensor of ours (by its name) whose shape tells nothing, before it is read for a config."""
    for name, tensor in weights.items():
        dims = 2 if name.endswith(MATRICES) else 1 if name.endswith(VECTORS) else tensor.dim()
        if tensor.dim() != dims or not tensor.numel():
            expected = f"{dims} dimension{'s' if dims > 1 else ''} and values in it"
            raise ValueError(
                f"{folder}: {name} has shape {tuple(tensor.shape)}, expected were {expected}: the file is damaged"
            )


def check_vocabulary(folder: Path, d2t: Tensor | None, config: LayerConfig) -> None:
    if d2t is None:
        raise ValueError(
            f"{folder} drafts {config.draft_vocab_size} of {config.vocab_size} tokens but has no d2t to say which"
        )
    if d2t.shape != (config.draft_vocab_size,):
        raise ValueError(f"{folder}: d2t has shape {tuple(d2t.shape)}, the draft vocabulary {config.draft_vocab_size}")
    ids = torch.arange(len(d2t)) + d2t.long()
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size or len(ids.unique()) < len(ids):
        raise ValueError(f"{folder}: d2t maps draft tokens outside the vocabulary or two to one")
