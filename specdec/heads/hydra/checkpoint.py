"""`HydraCheckpoint`: reads Hydra heads in the layout of Hydra's own training, config.json and hydra_lm_head.pt.

The config lacks most facts, so they are inferred from the weights.
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
# Hydra's parameter names, each with the specdec name. Some checkpoints count dropout modules among the blocks.
NAMES = (
    (re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.((linear|res_connection)\.(weight|bias))"), r"heads.\1.blocks.\2.\3"),
    (re.compile(r"hydra_lm_head\.(\d+)\.(?:\d+\.)?(weight|bias)"), r"heads.\1.lm_head.\2"),
    (re.compile(r"prefix_embeding_layer\.layers\.0\.(.*)"), r"prefix.layer.\1"),
    (re.compile(r"prefix_embeding_layer\.(norm\.weight)"), r"prefix.\1"),
)
ROTATION = "prefix_embeding_layer.layers.0.self_attn.rotary_emb.inv_freq"
IGNORED = {
    "input_embed_fn.weight": "the target's own",
    "prefix_embeding_layer.embed_tokens.weight": "the layer reads states instead",
    ROTATION: "recomputed",
}
BASE = 10000.0  # RoPE base of the prefix layer, whatever the target's is: Hydra's own Llama supports no other


@dataclass(frozen=True)
class HydraCheckpoint(Understood):
    """Checkpoint of Hydra heads."""

    config: HydraConfig  # type: ignore[assignment]

    def head(self) -> HydraHeads:
        with torch.device("meta"):
            head = HydraHeads(self.config)
        return filled(head, self.weights, self.path)


def is_hydra(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json describes Hydra heads."""
    return "hydra_num_heads" in config


def read(path: str | Path) -> HydraCheckpoint:
    """Read the checkpoint in a folder or on the hub (downloaded first).

    Raises:
        ValueError: the heads are of an unknown kind, or the weights do not fit.
    """
    folder = folder_of(path)
    config = read_head_config(folder)
    kind = config.get("hydra_head_arch", KINDS[0])
    if kind not in KINDS:
        raise ValueError(f"{folder} holds Hydra heads of kind {kind!r}, supported are {' and '.join(KINDS)}")
    if config.get("grounded_heads") is False:
        raise ValueError(
            f"{folder}: heads that do not read the drafted tokens before theirs (grounded_heads is false) are not "
            "supported"
        )
    tensors = read_tensors(folder, "hydra*.pt")
    ours = _our_names([name for name in tensors if name not in IGNORED])
    once(folder, ours)
    weights = {known: tensors[name] for name, known in ours.items()}
    check_shapes(folder, weights)
    if "heads.0.lm_head.weight" not in weights:
        raise ValueError(f"{folder} holds no hydra_lm_head: it is not a checkpoint of Hydra heads")
    fields: list[Field] = []
    understood = _config(folder, config, weights, tensors.get(ROTATION), fields)
    used = {name: tuple(tensors[name].shape) for name in ours}
    ignored = {name: why for name, why in IGNORED.items() if name in tensors}
    return HydraCheckpoint(folder, "Hydra", understood, tuple(fields), used, ignored, weights)


def _our_names(names: list[str]) -> dict[str, str]:
    """Map Hydra's names to specdec's, with the blocks of each head renumbered from 0."""
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
    """Infer the config.

    Args:
        rotation: the `inv_freq` of the prefix layer, or None if the file does not hold it.
        out: list that the facts are appended to.
    """
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
    """Infer the config of the prefix layer. Arguments as in `_config`."""
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
    """Infer the width of an attention head. q: width of all heads together."""
    if rotation is not None:
        if rotation.dim() != 1 or not rotation.numel():
            raise ValueError(f"{folder}: rotary_emb.inv_freq has shape {tuple(rotation.shape)}, expected a vector")
        expected = BASE ** -(torch.arange(len(rotation)) / len(rotation))
        if not torch.allclose(rotation.float(), expected, rtol=0.02):  # it may be saved in bfloat16
            raise ValueError(
                f"{folder}: rotary_emb.inv_freq does not have the base {BASE:g} that Hydra's own layer has"
            )
        return 2 * len(rotation)
    if config.get("num_attention_heads") is None:
        raise ValueError(
            f"{folder}: the head width of the prefix layer is unknown: there is neither rotary_emb.inv_freq nor "
            "num_attention_heads in config.json. Add the target's num_attention_heads to config.json"
        )
    return q // int(config["num_attention_heads"])
