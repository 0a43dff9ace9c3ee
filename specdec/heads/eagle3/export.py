"""`save`: writes a head in the two common layouts, or in specdec's own of half the size.

Owns the names and the config that each layout has.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from specdec.heads.eagle3.config import Eagle3Config
from specdec.heads.eagle3.head import Eagle3Head
from specdec.heads.export import among_all, layer_config, refuse_others, speculators_head, write
from specdec.heads.int8_weights import as_int8
from specdec.utils.choices import HeadLayout, check_choice


def save(head: Eagle3Head, folder: str | Path, layout: HeadLayout = "sglang", target: str = "") -> None:
    """Write a head: config.json and model.safetensors.

    Args:
        layout: "sglang" (also SafeAILab's and SpecForge's: `midlayer.*`; their code knows no biases in attention and
            leaves them out), "speculators" (vLLM's: `layers.0.*`), or "int8", which specdec alone reads: half the
            size, matrices of int8 with a float32 scale per row.
        target: name or path of the target, which vLLM's layout wants to know.

    Raises:
        ValueError: unknown layout, not an EAGLE-3 head, or a folder that holds another model's weights.
    """
    check_choice("layout", layout, HeadLayout)
    c = head.config
    if c.version != 3:
        raise ValueError("only EAGLE-3 heads can be exported: EAGLE-1 and 2 checkpoints have one layout already")
    folder = Path(folder)
    refuse_others(folder)
    weights = {name: tensor.contiguous().cpu() for name, tensor in head.state_dict().items()}
    if c.draft_vocab_size == c.vocab_size and not bool(weights["d2t"].any()):
        del weights["d2t"]
    else:
        weights["t2d"] = among_all(head.draft_to_target, c.vocab_size)
    if layout != "int8" and c.attention_bias and not c.output_bias:
        # vLLM takes either of the others, with `attention_bias` of all four projections, and misses no tensor.
        weights["layers.0.self_attn.o_proj.bias"] = torch.zeros(c.hidden_size, dtype=head.dtype)
    if layout != "speculators":
        weights = {name.replace("layers.0.", "midlayer.", 1): tensor for name, tensor in weights.items()}
    if layout == "int8":
        weights = as_int8(weights)
    described = _speculators_config(c, target) if layout == "speculators" else _sglang_config(c)
    dtype = str(head.dtype).removeprefix("torch.")
    if layout == "int8":
        dtype, described = "bfloat16", described | {"quantization_config": {"quant_method": "specdec-int8"}}
    write(folder, described | {"torch_dtype": dtype}, weights)


def lost_in(c: Eagle3Config, layout: HeadLayout) -> list[str]:
    """What of a head other engines leave out without a word when they read this layout, and what to do instead."""
    lost = []
    if layout == "sglang" and c.attention_bias:
        lost.append(
            "this head's attention has biases, which SafeAILab's and SGLang's code leaves out: it accepts less there. "
            "vLLM has them; a head trained with --no-attention-bias needs none"
        )
    if layout == "speculators":
        if c.fc_bias:
            lost.append("vLLM leaves out the bias of this head's fc: it accepts less there")
        if c.qk_norm and c.output_bias:
            lost.append("vLLM leaves out the bias of this head's o_proj, in a Qwen3 layer: it accepts less there")
        if c.fc_norm and c.norm_before_fc:
            lost.append("vLLM applies norm_before_fc ahead of fc_norm, this head behind it: it accepts less there")
    return lost


def _sglang_config(c: Eagle3Config) -> dict[str, Any]:
    said, entering = _taps(c, "entering")
    _, leaving = _taps(c, "output")
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_layer_config(c),
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": c.target_hidden_size,
        **_flags(c),
        **said,
        # Here vLLM looks, which counts the states that enter layers; below SGLang, which counts those that leave them.
        **({"eagle_aux_hidden_state_layer_ids": entering} if c.tap_convention_known and entering else {}),
        "eagle_config": {"use_aux_hidden_state": True}
        | ({} if leaving is None else {"eagle_aux_hidden_state_layer_ids": leaving}),
    }


def _speculators_config(c: Eagle3Config, target: str) -> dict[str, Any]:
    said, taps = _taps(c, "entering")
    return {
        "architectures": ["Eagle3DraftModel"],
        **speculators_head("eagle3", 3, target),
        "transformer_layer_config": _layer_config(c),
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": c.target_hidden_size,
        **_flags(c),
        **said,
        **({} if taps is None else {"eagle_aux_hidden_state_layer_ids": taps}),
    }


def _layer_config(c: Eagle3Config) -> dict[str, Any]:
    return layer_config(c, [c.sliding_window] * c.num_layers) | {"num_aux_hidden_states": c.num_taps}


def _flags(c: Eagle3Config) -> dict[str, Any]:
    return {
        "norm_before_residual": c.norm_before_residual,
        "norm_before_fc": c.norm_before_fc,
        "fc_norm": c.fc_norm,
        "norm_output": c.norm_output,
    }


def _taps(c: Eagle3Config, convention: str) -> tuple[dict[str, Any], list[int] | None]:
    """Our field about counting layers, and the ids; those whose convention is not known stay as they are."""
    if c.tap_ids is None:
        return {}, None
    if not c.tap_convention_known:
        return {"tap_convention_assumed": c.tap_convention}, list(c.tap_ids)
    shift = {("entering", "output"): -1, ("output", "entering"): 1}.get((c.tap_convention, convention), 0)
    return {"tap_convention": convention}, [tap + shift for tap in c.tap_ids]
