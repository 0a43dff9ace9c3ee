"""Shared code of all exports: configs and files in the layouts that other engines read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specdec.heads.config import LayerConfig
from specdec.heads.files import read_config

# Fields of `LayerConfig` with the same name in config.json.
LAYER_FIELDS = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps"),
    *("hidden_act", "attention_bias", "mlp_bias", "max_position_embeddings", "vocab_size"),
)


def draftable_mask(ids: Tensor, vocab_size: int) -> Tensor:
    """Return (V,) bool, True for tokens that can be drafted: the `t2d` of speculators. ids: (K,) int64."""
    return torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids.cpu(), True)


def write(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """Write config.json and model.safetensors, replacing both only when both are complete.

    The weights are moved last, so that an interrupted write is never mistaken for a finished one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    described, partial = folder / "config.json.part", folder / "model.safetensors.part"
    described.write_text(json.dumps(config, indent=2) + "\n")
    save_file(weights, partial, metadata={"format": "pt"})
    partial.chmod(described.stat().st_mode)  # safetensors lets only the owner read it
    described.replace(folder / "config.json")
    partial.replace(folder / "model.safetensors")


def check_overwrite(folder: Path) -> None:
    """Raise ValueError if the folder holds a model that is not a head: only heads may be overwritten."""
    try:
        config = read_config(folder)
    except ValueError:  # no readable config
        config = {}
    others = (folder / "config.json").exists() or any(folder.glob("*.safetensors"))
    if "draft_vocab_size" not in config and others:
        raise ValueError(f"{folder} holds another model, which would be overwritten: choose another folder")


def speculators_head(algorithm: str, tokens: int, target: str) -> dict[str, Any]:
    """Return the part of a speculators config that all heads have. tokens: tokens to draft per round."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": tokens}
    proposal |= {"verifier_accept_k": 1, "accept_tolerance": 0.0}
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
    """Return the part of a config that describes the decoder layers. windows: that of each layer, all equal or None."""
    described: dict[str, Any] = {
        "model_type": "qwen3" if c.qk_norm else "llama",
        "num_hidden_layers": c.num_layers,
        **{name: getattr(c, name) for name in LAYER_FIELDS},
        "rope_parameters": dict(c.rope),
        "rope_theta": c.rope["rope_theta"],  # this and rope_scaling are for engines older than rope_parameters
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
