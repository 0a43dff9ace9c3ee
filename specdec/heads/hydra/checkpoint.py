"""`HydraCheckpoint`: Hydra's heads as their own training wrote them: config.json and hydra_lm_head.pt.

The config says little: not even how many attention heads the layer over the states has. Its weights say it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.heads.checkpoint import Understood, check_shapes, filled
from specdec.heads.config import LayerConfig
from specdec.heads.config_fields import Field, read_head_config
from specdec.heads.files import folder_of, read_tensors
from specdec.heads.hydra.head import HydraConfig, HydraHeads
from specdec.heads.per_token import PerTokenConfig, counted, once, our_names

KINDS = ("mlp", "prefix-mlp")
# Hydra's names, and what they are in ours. Dropout took places of its own in some checkpoints' lists of blocks.
NAMES = (
    (re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.((linear|res_connection)\.(weight|bias))"), r"heads.\1.blocks.\2.\3"),
    (re.compile(r"hydra_lm_head\.(\d+)\.(?:\d+\.)?(weight|bias)"), r"heads.\1.lm_head.\2"),
    (re.compile(r"prefix_embeding_layer\.layers\.0\.(.*)"), r"prefix.layer.\1"),
    (re.compile(r"prefix_embeding_layer\.(norm\.weight)"), r"prefix.\1"),
)
ROTATION = "prefix_embeding_layer.layers.0.self_attn.rotary_emb.inv_freq"
IGNORED = {
    "input_embed_fn.weight": "the target's own",
    "prefix_embeding_layer.embed_tokens.weight": "states take its place",
    ROTATION: "computed anew",
}
BASE = 10000.0  # of the layer's rotation, whatever the target's is: Hydra's own Llama knows no other


@dataclass(frozen=True)
class HydraCheckpoint(Understood):
    """Of Hydra's heads."""

    config: HydraConfig  # type: ignore[assignment]

    def head(self) -> HydraHeads:
        with torch.device("meta"):
            head = HydraHeads(self.config)
        return filled(head, self.weights, self.path)


def is_hydra(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of Hydra's heads."""
    return "hydra_num_heads" in config


def read(path: str | Path) -> HydraCheckpoint:
    """Understand the checkpoint in a folder, or of a hub id (downloaded first).

    Raises:
        ValueError: heads of a kind that is not known, or weights that are not theirs.
    """
    folder = folder_of(path)
    config = read_head_config(folder)
    kind = config.get("hydra_head_arch", KINDS[0])
    if kind not in KINDS:
        raise ValueError(f"{folder} holds Hydra heads of the kind {kind!r}; known are {' and '.join(KINDS)}")
    if config.get("grounded_heads") is False:
        raise ValueError(f"{folder}: these heads do not read what was drafted before (grounded_heads is false)")
    tensors = read_tensors(folder, "hydra*.pt")
    ours = _our_names([name for name in tensors if name not in IGNORED])
    once(folder, ours)
    weights = {known: tensors[name] for name, known in ours.items()}
    check_shapes(folder, weights)
    if "heads.0.lm_head.weight" not in weights:
        raise ValueError(f"{folder} holds no hydra_lm_head: these are no Hydra heads")
    fields: list[Field] = []
    understood = _config(folder, config, weights, tensors.get(ROTATION), fields)
    used = {name: tuple(tensors[name].shape) for name in ours}
    ignored = {name: why for name, why in IGNORED.items() if name in tensors}
    return HydraCheckpoint(folder, "Hydra", understood, tuple(fields), used, ignored, weights)


def _our_names(names: list[str]) -> dict[str, str]:
    """By Hydra's names; the blocks of each head counted from 0."""
    ours = our_names(names, NAMES)
    blocks = sorted({(block[1], int(block[2])) for name in ours.values() if (block := _block(name))})
    places = {(head, i): [j for h, j in blocks if h == head].index(i) for head, i in blocks}
    for name, known in ours.items():
        if block := _block(known):
            ours[name] = f"heads.{block[1]}.blocks.{places[block[1], int(block[2])]}.{block[3]}"
    return ours


def _block(name: str) -> re.Match[str] | None:
    return re.fullmatch(r"heads\.(\d+)\.blocks\.(\d+)\.(.*)", name)


def _config(
    folder: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor], rotation: Tensor | None, out: list[Field]
) -> HydraConfig:
    """rotation: the layer's `inv_freq`, if the file holds it. out: gets what is known, and how."""
    vocab, hidden = weights["heads.0.lm_head.weight"].shape
    heads = sum(bool(re.fullmatch(r"heads\.\d+\.lm_head\.weight", name)) for name in weights)
    blocks = sum(bool(re.fullmatch(r"heads\.0\.blocks\.\d+\.linear\.weight", name)) for name in weights)
    said = (config.get("hydra_num_heads"), config.get("hydra_num_layers"))
    out += counted(PerTokenConfig(hidden, vocab, heads, blocks), *said)
    given = config.get("hidden_state_offset")
    offset = given or 0
    out.append(Field("state_offset", offset, "assumed" if given is None else "config"))
    prefix = None
    if any(name.startswith("prefix.") for name in weights):
        prefix = _layer(folder, config, weights, rotation, vocab, out)
    return HydraConfig(hidden, vocab, heads, blocks, prefix, offset)


def _layer(
    folder: Path,
    config: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    rotation: Tensor | None,
    vocab: int,
    out: list[Field],
) -> LayerConfig:
    """Of the layer over the states."""
    shapes = {}
    for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj"):
        if f"prefix.layer.{name}.weight" not in weights:
            raise ValueError(f"{folder} lacks prefix_embeding_layer.layers.0.{name}.weight")
        shapes[name] = weights[f"prefix.layer.{name}.weight"].shape
    q, hidden = shapes["self_attn.q_proj"]
    head_dim = _head_dim(folder, config, rotation, q)
    eps = config.get("rms_norm_eps")
    out += [
        Field("head_dim", head_dim, "config" if rotation is None else "weights"),
        Field("rms_norm_eps", 1e-6 if eps is None else eps, "assumed" if eps is None else "config"),
        Field("rope_theta", BASE, "assumed" if rotation is None else "weights"),
    ]
    return LayerConfig(
        hidden_size=hidden,
        vocab_size=vocab,
        draft_vocab_size=vocab,
        intermediate_size=shapes["mlp.gate_proj"][0],
        num_attention_heads=q // head_dim,
        num_key_value_heads=shapes["self_attn.k_proj"][0] // head_dim,
        head_dim=head_dim,
        target_hidden_size=hidden,
        rms_norm_eps=1e-6 if eps is None else eps,
    )


def _head_dim(folder: Path, config: Mapping[str, Any], rotation: Tensor | None, q: int) -> int:
    """Width of an attention head, of which there are q values in all."""
    if rotation is not None:
        if rotation.dim() != 1 or not rotation.numel():
            raise ValueError(f"{folder}: rotary_emb.inv_freq has shape {tuple(rotation.shape)}, a vector was expected")
        expected = BASE ** -(torch.arange(len(rotation)) / len(rotation))
        if not torch.allclose(rotation.float(), expected, rtol=0.02):  # it may be saved in bfloat16
            raise ValueError(f"{folder}: rotary_emb.inv_freq is not of base {BASE:g}, which Hydra's own layer has")
        return 2 * len(rotation)
    if config.get("num_attention_heads") is None:
        raise ValueError(
            f"{folder}: neither rotary_emb.inv_freq nor num_attention_heads in config.json says how wide the heads of "
            "the layer over the states are: write the target's num_attention_heads there"
        )
    return q // int(config["num_attention_heads"])
