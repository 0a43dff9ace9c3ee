"""`save`: writes a head in the two common layouts, or in specdec's own of half the size.

Owns the names and the config that each layout has.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specdec.choices import HeadLayout, check_choice
from specdec.eagle3.config import Eagle3Config, LayerConfig
from specdec.eagle3.files import read_config
from specdec.eagle3.head import Eagle3Head
from specdec.eagle3.int8 import as_int8


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


def among_all(ids: Tensor, vocab_size: int) -> Tensor:
    """(V,) bool, which of the target's tokens can be drafted: speculators' `t2d`. ids: (K,) int64."""
    return torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids.cpu(), True)


def write(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """Both files are replaced when both are whole. The weights last: a folder without them is not taken for a finished
    one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    described, partial = folder / "config.json.part", folder / "model.safetensors.part"
    described.write_text(json.dumps(config, indent=2) + "\n")
    save_file(weights, partial, metadata={"format": "pt"})
    partial.chmod(described.stat().st_mode)  # safetensors makes it the owner's alone
    described.replace(folder / "config.json")
    partial.replace(folder / "model.safetensors")


def refuse_others(folder: Path) -> None:
    """Heads are written over heads, not over a target."""
    try:
        config = read_config(folder)
    except ValueError:  # none, or none of a model's
        config = {}
    others = (folder / "config.json").exists() or any(folder.glob("*.safetensors"))
    if "draft_vocab_size" not in config and others:
        raise ValueError(f"{folder} holds another model, which would be lost: choose another folder")


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


def speculators_head(algorithm: str, tokens: int, target: str) -> dict[str, Any]:
    """What vLLM's layout says of any head. tokens: to draft in a round. target: its name or path."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "speculators_model_type": algorithm,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target, "architectures": []},
        },
    }


def layer_config(c: LayerConfig, windows: Sequence[int | None]) -> dict[str, Any]:
    """What a layout says of the head's layers. windows: tokens each looks back, all that have one the same."""
    described: dict[str, Any] = {
        "model_type": "qwen3" if c.qk_norm else "llama",
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "rms_norm_eps": c.rms_norm_eps,
        "hidden_act": c.hidden_act,
        "attention_bias": c.attention_bias,
        "mlp_bias": c.mlp_bias,
        "rope_parameters": dict(c.rope),
        "rope_theta": c.rope["rope_theta"],  # engines older than rope_parameters read these two
        "max_position_embeddings": c.max_position_embeddings,
        "vocab_size": c.vocab_size,
        "tie_word_embeddings": False,
    }
    scaling = {key: value for key, value in c.rope.items() if key != "rope_theta"}
    if scaling != {"rope_type": "default"}:
        described["rope_scaling"] = scaling
    if any(windows):
        described |= {
            "sliding_window": next(filter(None, windows)),
            "use_sliding_window": True,
            "layer_types": ["full_attention" if window is None else "sliding_attention" for window in windows],
        }
    return described


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
