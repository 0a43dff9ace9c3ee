"""Transfer of a head to another target, usually from a smaller model with the same tokens (the donor).

The head's own layers are kept and its inputs are mapped: one linear map takes the target's states to the features that
the head computed from its donor's, another one maps the embeddings. The head's width does not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.data.texts import Text
from specdec.heads.eagle3.config import default_taps
from specdec.heads.eagle3.head import Eagle3Head
from specdec.models.introspection import decoder_layers
from specdec.proposers.draft_heads.eagle3 import Eagle3Proposer
from specdec.training.teacher.base import embedding_of
from specdec.training.teacher.state_cache import states_of

RIDGE = 1e-2  # ridge penalty, relative to the inputs' variance
PROJECTIONS = tuple(f"layers.0.self_attn.{name}_proj.weight" for name in "qkv")  # they read [embedding, feature]


@torch.no_grad()
def transfer_head(
    head: Eagle3Head, donor: PreTrainedModel, target: PreTrainedModel, texts: Sequence[Text]
) -> Eagle3Head:
    """Transfer a head from `donor` to `target`.

    Args:
        head: EAGLE-3 head that drafts for `donor`.
        donor: model whose token ids mean the same as the target's.
        target: model to draft for.
        texts: texts that both models are run on, with a few times as many tokens as the target's taps are wide.

    Returns:
        A head for `target`, in float32 on the CPU.

    Raises:
        ValueError: The head is a P-EAGLE head, or does not fit its donor.
    """
    if head.mask_hidden is not None:
        raise ValueError(
            "a P-EAGLE head's mask state belongs to its own target, so the head cannot be transferred: leave out --from"
        )
    Eagle3Proposer(head).check(donor)
    head = deepcopy(head).float().cpu()
    taps = default_taps(len(decoder_layers(target)))
    # The first token's states are skipped: in many models they are hundreds of times larger than all others.
    own = torch.cat([rows[1:] for rows in states_of(donor, head.config.taps(len(decoder_layers(donor))), texts)])
    read = torch.cat([rows[1:] for rows in states_of(target, taps, texts)])
    old = embedding_of(donor) if head.embed_tokens is None else head.embed_tokens.weight
    new = embedding_of(target)
    seen = torch.cat([text.ids for text in texts]).bincount(minlength=len(new))
    return translate(head, head.fuse(own.float()), read.float(), old.cpu(), new.cpu(), seen, taps)


@torch.no_grad()
def translate(
    head: Eagle3Head,
    features: Tensor,
    read: Tensor,
    old: Tensor,
    new: Tensor,
    seen: Tensor,
    taps: tuple[int, ...],
) -> Eagle3Head:
    """Transfer a head, given the models' states over N tokens.

    Args:
        head: EAGLE-3 head to transfer.
        features: (N, H), the head's features of its donor's states.
        read: (N, taps * target H), the target's states.
        old: (V, E), embeddings that the head was trained with.
        new: (V, target E), the target's embeddings.
        seen: (V,) int64, counts of tokens in the texts.
        taps: layers whose states are in `read`, as `Taps` counts.
    """
    config = replace(
        head.config,
        target_hidden_size=read.shape[-1] // len(taps),
        vocab_size=len(new),
        tap_ids=taps,
        tap_convention="entering",
        tap_convention_known=True,
        norm_before_fc=False,
        fc_norm=False,
        own_embedding=False,
    )
    carried = Eagle3Head(config)
    known = torch.cat([seen.nonzero()[:, 0], head.draft_to_target]).unique()
    known = known[known < min(len(old), len(new))]
    embeds = carried.layers[0].input_layernorm(new[known].float())  # a fresh norm, whose weights are ones
    its_embeds = head.layers[0].input_layernorm(old[known].float())  # the old norm's weights become part of the map
    translate = _linear_map(embeds, its_embeds, 1.0 + seen[known].float())  # (E, target E)
    weights = {name: tensor for name, tensor in head.state_dict().items() if name in carried.state_dict()}
    weights["layers.0.input_layernorm.weight"] = carried.layers[0].input_layernorm.weight
    weights["fc.weight"] = _linear_map(read, features if head.fc.bias is None else features - head.fc.bias)
    for name in PROJECTIONS:
        of_embeds, of_features = weights[name].split([old.shape[-1], head.config.hidden_size], 1)
        weights[name] = torch.cat([of_embeds @ translate, of_features], 1)
    carried.load_state_dict(weights)
    return carried


def _linear_map(x: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
    """Fit the linear map (out, in) from x (N, in) to y (N, out), by ridge regression on inputs of unit deviation.

    weight: (N,) float32, weights of the rows. None: all equal.
    """
    deviation = x.std(0).clamp(min=1e-6)
    x = x / deviation
    weighted = x if weight is None else x * (weight / weight.mean())[:, None]
    square = weighted.T @ x
    ridge = RIDGE * len(x) * torch.eye(len(square), device=x.device)
    return torch.linalg.solve(square + ridge, weighted.T @ y).T / deviation
