"""Initialization of a fresh EAGLE-3 head from the target's weights, and change of a head's draft vocabulary.

The LM head starts with the target's rows, and the layer with the weights of the target's last layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.heads.dflash.head import DFlashHead
from specdec.heads.eagle3.config import Eagle3Config, default_taps
from specdec.heads.eagle3.head import Eagle3Head, FusingLayer
from specdec.models.introspection import decoder_layers
from specdec.training.teacher.base import embedding_of
from specdec.training.teacher.target_logits import TargetLogits
from specdec.training.teacher.unsharded import materialized

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def initialize(target: PreTrainedModel, draft_vocab: Tensor | int, **changes: Any) -> Eagle3Head:
    """Create a fresh EAGLE-3 head for a target.

    Args:
        target: model to draft for.
        draft_vocab: (K,) int64 ascending, the target's token ids that the head can draft. Or their number, for the
            lowest ids: in BPE vocabularies these are the earliest merges, and so frequent tokens.
        changes: fields of `Eagle3Config`. By default the layer has the shape of one of the target's.

    Returns:
        An `Eagle3Head` in float32, ready for `HeadTrainer`.

    Example:
        ```python
        head = initialize(target, 8192, num_layers=2)
        specdec.heads.eagle3.export.save(head, "head")
        ```
    """
    if isinstance(draft_vocab, int):
        draft_vocab = torch.arange(draft_vocab)
    head = Eagle3Head(config_for(target, len(draft_vocab), **changes))
    initialize_weights(head, target, draft_vocab)
    return head


def config_for(target: PreTrainedModel, draft_vocab_size: int, **changes: Any) -> Eagle3Config:
    """Create the config of a fresh head, whose layer has the shape of one of the target's. See `initialize`."""
    attention = getattr(decoder_layers(target)[-1], "self_attn", None)
    biased = getattr(getattr(attention, "q_proj", None), "bias", None) is not None
    return Eagle3Config(**shape_for(target, draft_vocab_size) | {"attention_bias": biased} | changes)


def shape_for(target: PreTrainedModel, draft_vocab_size: int) -> dict[str, Any]:
    """Return the config fields for a layer with the shape of one of the target's, and for a head's input and output."""
    text = target.config.get_text_config(decoder=True)
    H, heads = text.hidden_size, text.num_attention_heads
    return {
        "hidden_size": H,
        "target_hidden_size": H,
        "vocab_size": text.vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "intermediate_size": getattr(text, "intermediate_size", 4 * H),
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(text, "num_key_value_heads", heads),
        "head_dim": getattr(text, "head_dim", None) or H // heads,
        "rms_norm_eps": getattr(text, "rms_norm_eps", 1e-6),
        "max_position_embeddings": getattr(text, "max_position_embeddings", 4096),
        "tap_ids": default_taps(len(decoder_layers(target))),
    }


@torch.no_grad()
def initialize_weights(head: Eagle3Head | DFlashHead, target: PreTrainedModel, draft_vocab: Tensor) -> None:
    """Initialize a head at random, then copy the target's weights wherever the shapes match."""
    H, layers = head.config.target_hidden_size, decoder_layers(target)
    for module in head.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    assert head.d2t is not None
    assert head.lm_head is not None
    head.d2t.copy_(draft_vocab.cpu() - torch.arange(len(draft_vocab)))
    target_logits = TargetLogits.of(target, draft_vocab)
    head.lm_head.weight.copy_(target_logits.weight * target_logits.scale)
    if head.embed_tokens is not None:
        head.embed_tokens.weight.copy_(embedding_of(target))
    count = min(len(head.layers), len(layers))
    for ours, theirs in zip(list(head.layers)[-count:], list(layers)[-count:], strict=True):
        _copy_layer(ours, theirs)
    _copy_norm(head.norm, _part(target.get_decoder(), "norm"))
    if head.fc.weight.shape[0] == H:
        if isinstance(head, Eagle3Head):
            head.fc.weight.zero_()  # noise of 0.02 would be 63% as large as the identity added below
        head.fc.weight[:, -H:] += torch.eye(H)  # the feature starts as the highest state


@torch.no_grad()
def with_vocabulary(head: Eagle3Head, target: PreTrainedModel, draft_vocab: Tensor) -> Eagle3Head:
    """Return a head with another draft vocabulary.

    LM head rows of tokens already drafted are kept, like all other weights. Training has moved them away from the
    target's rows, partly by a common shift that changes no probability. New tokens therefore get the target's rows,
    mapped by the linear map that fits the target's rows of the old tokens to the head's.

    Args:
        head: head to change.
        target: model that it drafts for.
        draft_vocab: (K,) int64 ascending, the new draft vocabulary.
    """
    draft_vocab, known = draft_vocab.to(head.device), head.draft_to_target
    changed = Eagle3Head(replace(head.config, draft_vocab_size=len(draft_vocab))).to(head.device, head.dtype)
    weights = head.state_dict()
    ours, ids = weights["lm_head.weight"].float(), torch.cat([draft_vocab, known]).unique()
    theirs = TargetLogits.of(target, ids.cpu()).weight.to(head.device, torch.float32)  # (tokens, target H)
    own = theirs[torch.searchsorted(ids, known)]
    square = own.T @ own
    ridge = 1e-4 * square.diagonal().mean() * torch.eye(len(square), device=head.device)
    rows = theirs[torch.searchsorted(ids, draft_vocab)] @ torch.linalg.solve(square + ridge, own.T @ ours)
    stays = torch.isin(known, draft_vocab)
    rows[torch.searchsorted(draft_vocab, known[stays])] = ours[stays]
    d2t = draft_vocab - torch.arange(len(draft_vocab), device=head.device)
    changed.load_state_dict(weights | {"lm_head.weight": rows.to(head.dtype), "d2t": d2t})
    return changed


def _copy_layer(ours: Any, theirs: nn.Module) -> None:
    """Copy the weights of a target's layer that have the usual names and shapes. The rest stays random."""
    wide = 2 if isinstance(ours, FusingLayer) else 1  # a fusing layer reads the embedding and the feature
    attention, mlp = getattr(theirs, "self_attn", None), getattr(theirs, "mlp", None)
    for name in ("q_proj", "k_proj", "v_proj"):
        mine, its = getattr(ours.self_attn, name), _part(attention, name)
        if _fits(its, (mine.weight.shape[0], mine.weight.shape[1] // wide)):
            mine.weight.copy_(torch.cat([its.weight] * wide, 1) / wide)
            if mine.bias is not None and its.bias is not None:
                mine.bias.copy_(its.bias)
    out = _part(attention, "o_proj")
    if _fits(out, ours.self_attn.o_proj.weight.shape):
        ours.self_attn.o_proj.weight.copy_(out.weight)
    its = [_part(mlp, name) for name in PROJECTIONS]
    width, H = ours.mlp.gate_proj.weight.shape
    if all(isinstance(part, nn.Linear) for part in its) and _fits(its[0], (max(width, its[0].out_features), H)):
        gate, up, down = (part.weight.float() for part in its)
        strongest = (gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)).topk(width).indices  # for a narrower MLP
        ours.mlp.gate_proj.weight.copy_(gate[strongest])
        ours.mlp.up_proj.weight.copy_(up[strongest])
        ours.mlp.down_proj.weight.copy_(down[:, strongest])
    for norm, name in (
        (ours.input_layernorm, "input_layernorm"),
        (getattr(ours, "hidden_norm", None), "input_layernorm"),
        (ours.post_attention_layernorm, "post_attention_layernorm"),
    ):
        _copy_norm(norm, _part(theirs, name))


def _part(module: nn.Module | None, name: str) -> Any:
    """Return a submodule of a target's module by name, with weights that can be copied; None if there is none."""
    found = getattr(module, name, None)
    return materialized(found) if isinstance(found, nn.Module) else found


def _fits(module: Any, shape: tuple[int, ...]) -> bool:
    return isinstance(module, nn.Linear) and tuple(module.weight.shape) == tuple(shape)


def _copy_norm(ours: nn.Module | None, theirs: nn.Module | None) -> None:
    """Copy the effect of a norm rather than its weight: Gemma's norms multiply by 1 + weight."""
    weight = getattr(theirs, "weight", None)
    if ours is None or theirs is None or weight is None or weight.shape != ours.weight.shape:
        return
    effect = theirs(torch.ones_like(weight))  # for a state whose mean square is 1
    if bool(effect.any()):  # 0 for a layer norm, which subtracts the mean
        ours.weight.copy_(effect)
