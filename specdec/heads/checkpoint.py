"""`Understood`: a parsed checkpoint, and the checks of its tensors' names, shapes and vocabulary.

All kinds of heads and all layouts share this code.
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
# Prefixes of tensor names in other layouts, each with the specdec prefix.
RENAMED = {"midlayer.": "layers.0.", "encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
# Suffixes of the tensors from whose shapes the config is inferred: matrices and vectors.
MATRICES = ("fc.weight", "lm_head.weight", "embed_tokens.weight", "proj.weight", "markov_w1.weight")
VECTORS = ("norm.weight", "d2t")
# Tensors that a head does not compute with, each with the reason that `specdec inspect` gives.
IGNORED = {
    "t2d": "the inverse of d2t",
    "rotary_emb.inv_freq": "computed from the config",
    "verifier_lm_head.weight": "the target's own",
    "verifier_norm.weight": "the target's own",
}


@dataclass(frozen=True)
class Understood:
    """Parsed checkpoint of a head.

    Attributes:
        path: the local folder.
        format: name of the layout.
        config: the head's config.
        fields: every fact about the head, with its source.
        used: shapes of the tensors in use, by the checkpoint's names.
        ignored: reasons for the tensors left out, by the checkpoint's names.
        weights: tensors in use, by specdec's names.
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
        """Names of the tensors that the head borrows from its target."""
        return [] if self.config.own_embedding else ["embed_tokens.weight"]


def filled(head: M, weights: Mapping[str, Tensor], path: Path) -> M:
    """Fill a head on the meta device with weights, and freeze it.

    Raises:
        ValueError: a tensor is missing, unexpected, or of another shape or kind of number.
    """
    state = head.state_dict()
    expected = {name: tuple(tensor.shape) for name, tensor in state.items()}
    missing = sorted(expected.keys() - weights.keys())
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}")
    unplaced = sorted(weights.keys() - expected.keys())
    if unplaced:
        raise ValueError(f"{path} holds {', '.join(unplaced)}, which this kind of head does not have")
    for name, tensor in weights.items():
        if tuple(tensor.shape) != expected[name]:
            raise ValueError(
                f"{path}: {name} has shape {tuple(tensor.shape)}, expected {expected[name]} from the config and the "
                "other weights"
            )
        if tensor.is_floating_point() != state[name].is_floating_point():
            wanted = "floating-point numbers" if state[name].is_floating_point() else "integers"
            raise ValueError(f"{path}: {name} has dtype {tensor.dtype}, expected {wanted}: the file is damaged")
    dtype = weights["fc.weight" if "fc.weight" in weights else min(weights)].dtype
    head.load_state_dict(
        {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in weights.items()},
        assign=True,
    )
    return head.requires_grad_(False).eval()


def placed(
    tensors: Mapping[str, Tensor], folder: Path
) -> tuple[dict[str, Tensor], dict[str, tuple[int, ...]], dict[str, str]]:
    """Assign a file's tensors to specdec's names.

    Returns:
        `Understood.weights`, `Understood.used` and `Understood.ignored`.
    """
    weights: dict[str, Tensor] = {}
    used: dict[str, tuple[int, ...]] = {}
    ignored: dict[str, str] = {}
    for name, tensor in tensors.items():
        plain = name.removeprefix("model.")
        reason = next((why for end, why in IGNORED.items() if plain == end or plain.endswith("." + end)), None)
        if plain.endswith("self_attn.o_proj.bias") and not bool(tensor.any()):
            reason = "zeros, written for engines that expect it"
        if reason:
            ignored[name] = reason
            continue
        first = next((theirs for theirs in RENAMED if plain.startswith(theirs)), "")
        ours = RENAMED.get(first, "") + plain.removeprefix(first)
        if ours in weights:
            raise ValueError(f"{folder}: two tensors map to {ours}: {name} and another")
        weights[ours] = tensor
        used[name] = tuple(tensor.shape)
    check_shapes(folder, weights)
    return weights, used, ignored


def check_shapes(folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Raise ValueError for an empty tensor, or for one that the config is inferred from with a wrong number of dims."""
    for name, tensor in weights.items():
        dims = 2 if name.endswith(MATRICES) else 1 if name.endswith(VECTORS) else tensor.dim()
        if tensor.dim() != dims or not tensor.numel():
            expected = f"{dims} dimension{'s' if dims > 1 else ''} and at least one value"
            raise ValueError(
                f"{folder}: {name} has shape {tuple(tensor.shape)}, expected {expected}: the file is damaged"
            )


def check_vocabulary(folder: Path, d2t: Tensor | None, config: LayerConfig) -> None:
    """Raise ValueError unless d2t maps the draft tokens to distinct tokens of the target's vocabulary."""
    if d2t is None:
        raise ValueError(
            f"{folder} drafts {config.draft_vocab_size} of {config.vocab_size} tokens but has no d2t that maps them to "
            "the target's"
        )
    if d2t.shape != (config.draft_vocab_size,):
        raise ValueError(f"{folder}: d2t has shape {tuple(d2t.shape)}, expected ({config.draft_vocab_size},)")
    ids = torch.arange(len(d2t)) + d2t.long()
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size or len(ids.unique()) < len(ids):
        raise ValueError(f"{folder}: d2t maps draft tokens outside the vocabulary, or two to the same token")
