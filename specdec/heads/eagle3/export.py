"""`save`: writes an EAGLE-3 head in the two common layouts, or in specdec's own 8-bit layout. `widen`: pads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.heads.eagle3.config import Eagle3Config
from specdec.heads.eagle3.head import Eagle3Head
from specdec.heads.export import check_overwrite, draftable_mask, layer_config, speculators_head, write
from specdec.heads.int8_weights import to_int8
from specdec.utils.choices import HeadLayout, check_choice

# Fields of `Eagle3Config` with the same name in config.json.
HEAD_FIELDS = (
    *("draft_vocab_size", "target_hidden_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"),
)


def save(head: Eagle3Head, folder: str | Path, layout: HeadLayout = "sglang", target: str = "") -> None:
    """Write a head's config.json and model.safetensors.

    Args:
        head: an EAGLE-3 head.
        folder: created if it does not exist. A head in it is replaced.
        layout: "sglang", "speculators" or "int8". "sglang" (`midlayer.*`) is also SafeAILab's and SpecForge's layout.
            Those engines ignore biases in attention. "speculators" (`layers.0.*`) is vLLM's. "int8" takes half the
            size, with a float32 scale per row of each matrix, and only specdec reads it.
        target: name or path of the target, which vLLM reads from the config.

    Raises:
        ValueError: the layout is unknown, it is not an EAGLE-3 head, or the folder holds another model.

    Example:
        ```python
        save(load("heads/mine"), "exported", layout="speculators", target="Qwen/Qwen3-8B")
        ```
    """
    check_choice("layout", layout, HeadLayout)
    c = head.config
    if c.version != 3:
        raise ValueError(
            "this is an EAGLE-1 or 2 head, but only EAGLE-3 heads can be exported: use its checkpoint as it is, all "
            "engines read the same layout"
        )
    folder = Path(folder)
    check_overwrite(folder)
    weights = {name: tensor.contiguous().cpu() for name, tensor in head.state_dict().items()}
    if c.draft_vocab_size == c.vocab_size and not bool(weights["d2t"].any()):
        del weights["d2t"]
    else:
        weights["t2d"] = draftable_mask(head.draft_to_target, c.vocab_size)
    described, weights = WRITERS[layout](head, weights, target)
    write(folder, {"torch_dtype": str(head.dtype).removeprefix("torch.")} | described, weights)


def _sglang(head: Eagle3Head, weights: dict[str, Tensor], target: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return _sglang_config(head.config), _with_midlayer(_with_output_bias(head, weights))


def _speculators(head: Eagle3Head, weights: dict[str, Tensor], target: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return _speculators_config(head.config, target), _with_output_bias(head, weights)


def _int8(head: Eagle3Head, weights: dict[str, Tensor], target: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = _sglang_config(head.config) | {"quantization_config": {"quant_method": "specdec-int8"}}
    return config | {"torch_dtype": "bfloat16"}, to_int8(_with_midlayer(weights))


# For each of `choices.HeadLayout`: config.json and tensors, from the head, its tensors and the target's name.
WRITERS: dict[HeadLayout, Callable[[Eagle3Head, dict[str, Tensor], str], tuple[dict[str, Any], dict[str, Tensor]]]] = {
    "sglang": _sglang,
    "speculators": _speculators,
    "int8": _int8,
}


def _with_midlayer(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("layers.0.", "midlayer.", 1): tensor for name, tensor in weights.items()}


def _with_output_bias(head: Eagle3Head, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add a bias of zeros to the output projection if the other projections have one.

    vLLM reads either layout, expects a bias in all four projections, and does not report missing tensors.
    """
    c = head.config
    if not c.attention_bias or c.output_bias:
        return weights
    return weights | {"layers.0.self_attn.o_proj.bias": torch.zeros(c.hidden_size, dtype=head.dtype)}


@torch.no_grad()
def widen(head: Eagle3Head) -> Eagle3Head:
    """Return a head of the target's width that drafts the same tokens, or the head itself if it has that width.

    A head that is narrower is padded with zeros, for engines that require equal widths.

    Raises:
        ValueError: the head is wider than its target.
    """
    c = head.config
    if c.embedding_size == c.hidden_size:
        return head
    if c.hidden_size > c.target_hidden_size:
        raise ValueError(
            f"this head is {c.hidden_size} wide, its target {c.target_hidden_size}, and no other engine reads heads "
            'wider than the target: export it with the layout "int8", for specdec'
        )
    wide = Eagle3Head(replace(c, hidden_size=c.target_hidden_size)).to(head.device, head.dtype)
    shrunk = (c.hidden_size / c.target_hidden_size) ** 0.5  # the mean square of a norm is taken over more entries
    weights = wide.state_dict()
    for name, own in head.state_dict().items():
        norm = name.endswith("norm.weight") and own.shape != weights[name].shape
        weights[name].zero_()[tuple(map(slice, own.shape))] = own * shrunk if norm else own
    return wide


def lost_in(c: Eagle3Config, layout: HeadLayout) -> list[str]:
    """Return the features of a head that other engines silently ignore in this layout, with the workaround."""
    lost = []
    if layout == "sglang" and c.attention_bias:
        lost.append(
            "SafeAILab's and SGLang's code ignores the biases in this head's attention, so fewer tokens are accepted. "
            "Use vLLM, or train a head with --no-attention-bias"
        )
    if layout == "speculators":
        if c.fc_bias:
            lost.append("vLLM ignores the bias of this head's fc, so fewer tokens are accepted")
        if c.qk_norm and c.output_bias:
            lost.append("vLLM ignores the bias of this head's o_proj in a Qwen3 layer, so fewer tokens are accepted")
        if c.fc_norm and c.norm_before_fc:
            lost.append(
                "vLLM applies norm_before_fc before fc_norm, this head applies it after, so fewer tokens are accepted"
            )
    return lost


def _sglang_config(c: Eagle3Config) -> dict[str, Any]:
    convention, entering = _taps(c, "entering")
    _, leaving = _taps(c, "output")
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **({} if c.mask_token_id is None else {"block_size": c.block_size}),
        **_layer_config(c),
        **_head_fields(c),
        **convention,
        # vLLM reads the ids here and counts states that enter layers. SGLang reads those below and counts outputs.
        **({"eagle_aux_hidden_state_layer_ids": entering} if c.tap_convention_known and entering else {}),
        "eagle_config": {"use_aux_hidden_state": True}
        | ({} if leaving is None else {"eagle_aux_hidden_state_layer_ids": leaving}),
    }


def _speculators_config(c: Eagle3Config, target: str) -> dict[str, Any]:
    convention, taps = _taps(c, "entering")
    algorithm, tokens = ("eagle3", 3) if c.mask_token_id is None else ("peagle", c.block_size)
    return {
        "architectures": ["Eagle3DraftModel"],
        **speculators_head(algorithm, tokens, target),
        "transformer_layer_config": _layer_config(c),
        **_head_fields(c),
        **convention,
        **({} if taps is None else {"eagle_aux_hidden_state_layer_ids": taps}),
    }


def _layer_config(c: Eagle3Config) -> dict[str, Any]:
    return layer_config(c, [c.sliding_window] * c.num_layers) | {"num_aux_hidden_states": c.num_taps}


def _head_fields(c: Eagle3Config) -> dict[str, Any]:
    window = {} if c.draft_window is None else {"draft_window": c.draft_window}
    masks = {} if c.mask_token_id is None else {"mask_token_id": c.mask_token_id}
    return {name: getattr(c, name) for name in HEAD_FIELDS} | window | masks


def _taps(c: Eagle3Config, convention: str) -> tuple[dict[str, Any], list[int] | None]:
    """Return specdec's config field for the convention, and the ids, unchanged if their convention is unknown."""
    if c.tap_ids is None:
        return {}, None
    if not c.tap_convention_known:
        return {"tap_convention_assumed": c.tap_convention}, list(c.tap_ids)
    shift = {("entering", "output"): -1, ("output", "entering"): 1}.get((c.tap_convention, convention), 0)
    return {"tap_convention": convention}, [tap + shift for tap in c.tap_ids]
