"""Tiny checkpoints with MTP layers in them, in the layouts of the families that have such layers."""

import copy
import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests import tiny

VOCAB = 16  # so few that some drafts of random layers are accepted
BASE = tiny.BASE | {"vocab_size": VOCAB}
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16}
LATENT |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
EXPERTS = {"n_routed_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
EXPERTS |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "shared_expert_intermediate_size": 16}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
# A config with one layer more than the target has: that one becomes the MTP layer.
CONFIGS = {
    "deepseek_v3": BASE | EXPERTS | LATENT | {"num_hidden_layers": 3},
    "glm4_moe": BASE | EXPERTS | {"num_hidden_layers": 3, "head_dim": 8, "use_qk_norm": True},
    "qwen3_5_text": BASE
    | DELTA
    | {"num_hidden_layers": 3, "head_dim": 8, "layer_types": ["linear_attention", "full_attention", "full_attention"]}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0}},
}
LAYOUTS = {"qwen3_5_text": "mtp"}
ROLES = {
    "behind": ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "mtp": ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
}


def target(family: str, folder: Path, layers: int = 1, seed: int = 0) -> PreTrainedModel:
    """A tiny random target that was loaded from `folder`, which has MTP layers besides."""
    settings = copy.deepcopy(CONFIGS[family])
    count = settings["num_hidden_layers"] - 1  # of the target
    for name, value in settings.items():
        if isinstance(value, list):
            settings[name] = value + value[-1:] * (layers - 1)
    settings["num_hidden_layers"] = count + layers
    whole = tiny.randomised(AutoConfig.for_model(family, **settings), seed)
    whole.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    layout = LAYOUTS.get(family, "behind")
    torch.manual_seed(seed)
    if layout == "mtp":
        tensors = {_as_mtp(name, count): tensor for name, tensor in tensors.items()}
    for place in _places(layout, count, layers):
        tensors |= {place + name: tensor for name, tensor in _own(whole, layout).items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    for name, value in config.items():
        if isinstance(value, list) and len(value) == count + layers:
            config[name] = value[:count]
    config |= {"num_hidden_layers": count, "num_nextn_predict_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    loaded.generation_config = whole.generation_config
    return loaded


def _places(layout: str, count: int, layers: int) -> list[str]:
    return ["mtp."] if layout == "mtp" else [f"model.layers.{count + i}." for i in range(layers)]


def _as_mtp(name: str, count: int) -> str:
    behind = re.match(r"model\.layers\.(\d+)\.(.+)", name)
    if behind is None or int(behind[1]) < count:
        return name
    return f"mtp.layers.{int(behind[1]) - count}.{behind[2]}"


def _own(whole: PreTrainedModel, layout: str) -> dict[str, torch.Tensor]:
    """What an MTP layer has besides a decoder layer, random."""
    H = whole.config.hidden_size
    shapes = ((H,), (H,), (H, 2 * H), (H,))
    return {
        f"{role}.weight": torch.randn(shape) * (0.5 if len(shape) == 1 else 0.02) + (len(shape) == 1)
        for role, shape in zip(ROLES[layout], shapes, strict=True)
    }
