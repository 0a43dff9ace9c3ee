"""`read`: reads Hydra heads in the layout of Hydra's own training, config.json and hydra_lm_head.pt.

The config lacks most facts, so they are inferred from the weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.heads.checkpoint import HeadCheckpoint, rename_tensors
from specdec.heads.config import LayerConfig
from specdec.heads.config_fields import FieldReader, read_head_config
from specdec.heads.files import folder_of, read_tensors
from specdec.heads.hydra.head import HydraConfig, HydraHeads
from specdec.heads.per_token import shape_facts

KINDS = ("mlp", "prefix-mlp")
# Hydra's parameter names, each with the specdec name.
RULES = (
    (re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.((linear|res_connection)\.(weight|bias))"), r"heads.\1.blocks.\2.\3"),
    (re.compile(r"hydra_lm_head\.(\d+)\.(?:\d+\.)?(weight|bias)"), r"heads.\1.lm_head.\2"),
    (re.compile(r"prefix_embeding_layer\.layers\.0\.(.*)"), r"prefix.layer.\1"),
    (re.compile(r"prefix_embeding_layer\.(norm\.weight)"), r"prefix.\1"),
)
BLOCK = re.compile(r"heads\.(\d+)\.blocks\.(\d+)\.")
ROTATION = "prefix_embeding_layer.layers.0.self_attn.rotary_emb.inv_freq"
IGNORED = {
    "input_embed_fn.weight": "the target's own",
    "prefix_embeding_layer.embed_tokens.weight": "the layer reads states instead",
    ROTATION: "recomputed",
}
BASE = 10000.0  # RoPE base of the prefix layer, whatever the target's is: Hydra's own Llama supports no other


def is_hydra(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json describes Hydra heads."""
    return "hydra_num_heads" in config


def read(path: str | Path) -> HeadCheckpoint[HydraHeads]:
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
    weights, used, ignored = rename_tensors(tensors, folder, RULES, IGNORED)
    weights = _renumbered(weights)
    if "heads.0.lm_head.weight" not in weights:
        raise ValueError(f"{folder} holds no hydra_lm_head: it is not a checkpoint of Hydra heads")
    reader = HydraReader(folder, config, weights)
    c = reader.config(tensors.get(ROTATION))
    return HeadCheckpoint(HydraHeads, folder, "Hydra", c, reader.fields, used, ignored, weights)


def _renumbered(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Number the blocks of each head from 0: some checkpoints count dropout modules, too."""
    indices: dict[str, set[int]] = {}
    for name in weights:
        if found := BLOCK.match(name):
            indices.setdefault(found[1], set()).add(int(found[2]))

    def renumbered(found: re.Match[str]) -> str:
        return f"heads.{found[1]}.blocks.{sorted(indices[found[1]]).index(int(found[2]))}."

    return {BLOCK.sub(renumbered, name): tensor for name, tensor in weights.items()}


class HydraReader(FieldReader):
    """Infers a `HydraConfig` from a checkpoint's weights and config.json."""

    def config(self, rotation: Tensor | None) -> HydraConfig:
        """Infer the config. rotation: `inv_freq` of the prefix layer, None if the file does not hold it."""
        vocab, hidden = self.weights["heads.0.lm_head.weight"].shape
        heads = sum(bool(re.fullmatch(r"heads\.\d+\.lm_head\.weight", name)) for name in self.weights)
        blocks = sum(bool(re.fullmatch(r"heads\.0\.blocks\.\d+\.linear\.weight", name)) for name in self.weights)
        c = HydraConfig(hidden, vocab, heads, blocks)
        self.fields += shape_facts(c, self.top.get("hydra_num_heads"), self.top.get("hydra_num_layers"))
        offset = self._from_config("state_offset", self.top.get("hidden_state_offset"), 0)
        prefix = any(name.startswith("prefix.") for name in self.weights)
        return replace(c, state_offset=offset, prefix=self._prefix(rotation, vocab) if prefix else None)

    def _prefix(self, rotation: Tensor | None, vocab: int) -> LayerConfig:
        names = ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj")
        for name in names:
            if f"prefix.layer.{name}.weight" not in self.weights:
                raise ValueError(f"{self.folder} lacks prefix_embeding_layer.layers.0.{name}.weight")
        (q, hidden), (kv, _), (wide, _) = (self.weights[f"prefix.layer.{name}.weight"].shape for name in names)
        head_dim = self._record("head_dim", self._head_dim(rotation, q), "config" if rotation is None else "weights")
        eps = self._from_config("rms_norm_eps", self.top.get("rms_norm_eps"), 1e-6)
        self._record("rope_theta", BASE, "assumed" if rotation is None else "weights")
        return LayerConfig(
            hidden_size=hidden,
            vocab_size=vocab,
            draft_vocab_size=vocab,
            intermediate_size=wide,
            num_attention_heads=q // head_dim,
            num_key_value_heads=kv // head_dim,
            head_dim=head_dim,
            target_hidden_size=hidden,
            rms_norm_eps=eps,
        )

    def _head_dim(self, rotation: Tensor | None, q: int) -> int:
        """Infer the width of an attention head. q: width of all heads together."""
        if rotation is not None:
            if rotation.dim() != 1 or not rotation.numel():
                raise ValueError(
                    f"{self.folder}: rotary_emb.inv_freq has shape {tuple(rotation.shape)}, expected a vector"
                )
            expected = BASE ** -(torch.arange(len(rotation)) / len(rotation))
            if not torch.allclose(rotation.float(), expected, rtol=0.02):  # it may be saved in bfloat16
                raise ValueError(
                    f"{self.folder}: rotary_emb.inv_freq does not have the base {BASE:g} that Hydra's own layer has"
                )
            return 2 * len(rotation)
        if self.top.get("num_attention_heads") is None:
            raise ValueError(
                f"{self.folder}: the head width of the prefix layer is unknown: there is neither rotary_emb.inv_freq "
                "nor num_attention_heads in config.json. Add the target's num_attention_heads to config.json"
            )
        return q // int(self.top["num_attention_heads"])
