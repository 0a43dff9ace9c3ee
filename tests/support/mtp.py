"""Tiny checkpoints with MTP layers in them, in the layouts of the families that have such layers."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from specdec.models.introspection import decoder_layers
from tests.support import tiny

VOCAB = 16  # so few that some drafts of random layers are accepted
BASE = tiny.BASE | {"vocab_size": VOCAB}
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16}
LATENT |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
EXPERTS = {"n_routed_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
EXPERTS |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "shared_expert_intermediate_size": 16}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
DELTA |= {"head_dim": 8, "layer_types": ["linear_attention", "full_attention", "full_attention"]}
DELTA |= {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0}}
# In the blocks of 64 by 32 that bitsandbytes takes 4 bits in, on CPUs with AVX-512 BF16 (0.50).
IN_BLOCKS = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "head_dim": 32}
IN_BLOCKS |= {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
IN_BLOCKS |= {"linear_num_key_heads": 32, "linear_num_value_heads": 32}
# Of a model with all layers that the target has, and behind them the decoder layers of one MTP layer.
CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v3": BASE | EXPERTS | LATENT | {"num_hidden_layers": 3},
    "glm4_moe": BASE | EXPERTS | {"num_hidden_layers": 3, "head_dim": 8, "use_qk_norm": True},
    "glm4_moe_lite": BASE
    | EXPERTS
    | LATENT
    | {"num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "sparse"], "head_dim": 8},
    "qwen3_5_text": BASE | DELTA | {"num_hidden_layers": 3},
    "qwen3_5_moe_text": BASE | DELTA | EXPERTS | {"num_hidden_layers": 3},
    "qwen3_next": BASE | DELTA | EXPERTS | {"num_hidden_layers": 3, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "nemotron_h": BASE
    | EXPERTS
    | {"layer_types": ["linear_attention", "full_attention", "mlp", "moe", "full_attention", "moe"]}
    | {"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 8, "chunk_size": 16, "head_dim": 8}
    | {"moe_shared_expert_intermediate_size": 16, "num_hidden_layers": None},
    "mimo_v2_flash": BASE
    | EXPERTS
    | {"num_hidden_layers": 4, "head_dim": 8, "v_head_dim": 8, "sliding_window": 6}
    | {"layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]}
    | {"mlp_layer_types": ["dense", "sparse", "sparse", "dense"]},
    "exaone_moe": BASE
    | EXPERTS
    | {"num_hidden_layers": 4, "head_dim": 8, "sliding_window": 6, "num_shared_experts": 1}
    | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]}
    | {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "is_moe_layer": None},
    "mellum": BASE
    | EXPERTS
    | {"num_hidden_layers": 3, "head_dim": 8, "sliding_window": 6, "mlp_layer_types": ["sparse"] * 3}
    | {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    "hy_v3": BASE | EXPERTS | {"num_hidden_layers": 3, "head_dim": 8},
    "bailing_hybrid": BASE | EXPERTS | LATENT | {"num_hidden_layers": 4, "layer_group_size": 2, "head_dim": 8},
}
DEEP = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
QWEN = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
OWN = ("enorm", "hnorm", "eh_proj", "final_layernorm")
LAYOUTS = {
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "exaone_moe", "mellum"), "mtp."),
    "nemotron_h": "mtp.layers.",
    "mimo_v2_flash": "model.mtp.layers.",
}
LAYERS_OF_ONE = {"nemotron_h": 2}  # decoder layers of one MTP layer, where that is not one


def target(family: str, folder: Path, layers: int = 1, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A tiny random target that was loaded from `folder`, which has MTP layers besides; `blocks.pt` there holds what
    is in their decoder layers. changes: to its config."""
    settings, each = copy.deepcopy(CONFIGS[family] | changes), LAYERS_OF_ONE.get(family, 1)
    total = settings["num_hidden_layers"] or len(settings["layer_types"])
    count = total - each  # of the target
    for name, value in settings.items():
        if isinstance(value, list) and len(value) == total:
            settings[name] = value + value[-each:] * (layers - 1)
    if settings["num_hidden_layers"] is not None:
        settings["num_hidden_layers"] = count + each * layers
    whole = tiny.randomised(AutoConfig.for_model(family, **{k: v for k, v in settings.items() if v is not None}), seed)
    whole.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    torch.manual_seed(seed)
    layout = LAYOUTS.get(family, "behind")
    tensors = {_renamed(name, count, layout): tensor for name, tensor in tensors.items()}
    tensors |= _own(whole.config.hidden_size, count, layers, each, layout)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    for name, value in config.items():
        if isinstance(value, list) and len(value) == count + each * layers:
            config[name] = value[:count]
    config |= {"num_hidden_layers": count, "num_nextn_predict_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    loaded.generation_config = whole.generation_config
    torch.save([layer.state_dict() for layer in decoder_layers(whole)[count:]], folder / "blocks.pt")
    return loaded


def _renamed(name: str, count: int, layout: str) -> str:
    behind = re.match(r"(?:model|backbone)\.layers\.(\d+)\.(.+)", name)
    if behind is None or int(behind[1]) < count or layout == "behind":
        return name
    rest = behind[2]
    if layout == "model.mtp.layers.":
        rest = rest.replace("post_attention_layernorm", "pre_mlp_layernorm")
    return f"{layout.removesuffix('layers.')}layers.{int(behind[1]) - count}.{rest}"


def _own(H: int, count: int, layers: int, each: int, layout: str) -> dict[str, torch.Tensor]:
    """What MTP layers have besides decoder layers, random."""
    if layout == "mtp.":
        places = [(("mtp.",) * 4, QWEN)]
    elif layout == "behind":
        places = [((f"model.layers.{count + i}.",) * 4, DEEP) for i in range(layers)]
    else:
        places = [((*(f"{layout}{i * each}.",) * 3, f"{layout}{(i + 1) * each - 1}."), OWN) for i in range(layers)]
    shapes = ((H,), (H,), (H, 2 * H), (H,))
    return {
        f"{place}{role}.weight": torch.randn(shape) * (0.5 if len(shape) == 1 else 0.02) + (len(shape) == 1)
        for where, roles in places
        for place, role, shape in zip(where, roles, shapes, strict=True)
    }
