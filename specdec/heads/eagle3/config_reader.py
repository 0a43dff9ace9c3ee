"""`ConfigReader`: infers an `Eagle3Config` from a checkpoint's weights and config.json, else from defaults.

The names and shapes of the weights take precedence over the config. Facts that neither gives are assumed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from specdec.heads.config_fields import FieldReader
from specdec.heads.eagle3.config import Eagle3Config
from specdec.heads.rope import read_rope

LAYER = re.compile(r"layers\.(\d+)\.")
PARALLEL_TOKENS = 8  # tokens that a P-EAGLE head drafts per pass if its config does not say: the speculators default
TAPS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "target_layer_ids")


class ConfigReader(FieldReader):
    """Builds an `Eagle3Config`. Arguments as for `FieldReader`, and names: the checkpoint's names of the tensors."""

    def __init__(
        self,
        folder: Path,
        config: dict[str, Any],
        weights: Mapping[str, Tensor],
        names: Sequence[str],
        nested: Sequence[str] = ("eagle_config",),
    ):
        super().__init__(folder, config, weights, nested)
        self.layer: dict[str, Any] = config.get("transformer_layer_config") or config
        self.speculators = "speculators_model_type" in config
        self.version = 3 if "layers.0.hidden_norm.weight" in weights else 1
        self.format = self._layout_name(names)

    def config(self) -> Eagle3Config:
        weights, seen = self.weights, self._from_weights
        H, wide = weights["fc.weight"].shape
        taps, convention, known = self._taps()
        num_taps = len(taps) if taps else 3
        target_hidden = seen("target_hidden_size", H if self.version == 1 else wide // num_taps)
        if self.version == 3 and target_hidden * num_taps != wide:
            raise ValueError(
                f"{self.folder}: fc.weight takes {wide} values, which are not {num_taps} states of equal width"
            )
        masked, newer = "mask_hidden" in weights, "fc_norm.0.weight" in weights
        return Eagle3Config(
            **self._layers(),
            vocab_size=self._vocab_size(),
            draft_vocab_size=self._draft_vocab_size(),
            target_hidden_size=target_hidden,
            sliding_window=self._window(),
            draft_window=self._draft_window(),
            tap_ids=taps,
            tap_convention=convention,
            tap_convention_known=known,
            version=seen("version", self.version),
            norm_before_fc=seen("norm_before_fc", "input_norm.weight" in weights),
            fc_norm=seen("fc_norm", newer),
            norm_before_residual=self._flag(
                "norm_before_residual", self.speculators, "as vLLM does" if self.speculators else "the paper's"
            ),
            norm_output=self._flag("norm_output", newer, "EAGLE-3.1, as it has fc_norm" if newer else "EAGLE-3"),
            fc_bias=seen("fc_bias", "fc.bias" in weights),
            own_embedding=seen("own_embedding", "embed_tokens.weight" in weights),
            mask_token_id=self._required("mask_token_id") if masked else None,
            block_size=self._parallel_tokens() if masked else 1,
        )

    def _layers(self) -> dict[str, Any]:
        """Infer the fields of `LayerConfig` that describe the decoder layers."""
        weights, layer, seen = self.weights, self.layer, self._from_weights
        q = self._weight("layers.0.self_attn.q_proj.weight").shape[0]
        kv = self._weight("layers.0.self_attn.k_proj.weight").shape[0]
        qk_norm = "layers.0.self_attn.q_norm.weight" in weights
        heads = layer.get("num_attention_heads")
        if qk_norm:
            head_dim = seen("head_dim", len(weights["layers.0.self_attn.q_norm.weight"]))
        else:
            head_dim = layer.get("head_dim") or (q // heads if heads else None)
            if head_dim is None:
                raise ValueError(f"{self.folder}/config.json has neither num_attention_heads nor head_dim: add one")
            self._record("head_dim", head_dim, "config" if layer.get("head_dim") else "weights")
        if q % head_dim or kv % head_dim:
            raise ValueError(f"{self.folder}: head_dim {head_dim} does not divide the projections' {q} and {kv} rows")
        layers = 1 + max(int(found[1]) for name in weights if (found := LAYER.match(name)))
        stated = layer.get("num_hidden_layers")
        note = f"the config says {stated}" if stated not in (None, layers) else ""
        defaults = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "max_position_embeddings": 4096}
        return {
            "hidden_size": seen("hidden_size", weights["fc.weight"].shape[0]),
            "intermediate_size": seen("intermediate_size", self._weight("layers.0.mlp.gate_proj.weight").shape[0]),
            "num_attention_heads": seen("num_attention_heads", q // head_dim),
            "num_key_value_heads": seen("num_key_value_heads", kv // head_dim),
            "head_dim": head_dim,
            "num_layers": seen("num_layers", layers, note),
            "attention_bias": seen("attention_bias", "layers.0.self_attn.q_proj.bias" in weights),
            "output_bias": seen("output_bias", "layers.0.self_attn.o_proj.bias" in weights),
            "mlp_bias": seen("mlp_bias", "layers.0.mlp.gate_proj.bias" in weights),
            "qk_norm": seen("qk_norm", qk_norm),
            "rope": self._rope(head_dim),
            **{name: self._from_config(name, layer.get(name), value) for name, value in defaults.items()},
        }

    def _parallel_tokens(self) -> int:
        """Return the number of tokens per pass that a P-EAGLE head was trained for."""
        methods = (self.top.get("speculators_config") or {}).get("proposal_methods") or [{}]
        # In speculators' layout `block_size` is a setting of the training.
        stated = methods[0].get("speculative_tokens") or (None if self.speculators else self.top.get("block_size"))
        return int(self._from_config("block_size", stated, PARALLEL_TOKENS))

    def _layout_name(self, names: Sequence[str]) -> str:
        if self.speculators:
            return "vLLM speculators"
        if self.version == 1:
            return "SafeAILab EAGLE-1 or 2"
        if any(name.startswith("layers.0.") for name in names):
            return "ModelOpt"
        return "SpecForge, SGLang or ModelOpt" if self.top.get("eagle_config") else "SafeAILab EAGLE-3"

    def _taps(self) -> tuple[tuple[int, ...] | None, str, bool]:
        if self.version == 1:
            self._from_weights("taps", "the target's final state")
            return None, "entering", True
        ids = next((part[name] for part in self.parts for name in TAPS if part.get(name)), None)
        if ids is None:
            self._record("taps", "low, middle and high", "assumed", "states entering layers 2, n // 2 and n - 3 of n")
            return None, "entering", True
        self._record("taps", list(ids), "config")
        stated = self.top.get("tap_convention")
        usual = self.top.get("tap_convention_assumed") or ("entering" if self.speculators else "output")
        note = "overridden by the target's number of layers if one convention gives the paper's taps"
        convention = self._from_config("tap_convention", stated or None, usual, note)
        return tuple(int(i) for i in ids), convention, bool(stated)

    def _vocab_size(self) -> int:
        if "embed_tokens.weight" in self.weights:
            return int(self._from_weights("vocab_size", self.weights["embed_tokens.weight"].shape[0]))
        size = self.layer.get("vocab_size") or self.top.get("vocab_size")
        if not size:
            raise ValueError(f"{self.folder}/config.json has no vocab_size")
        return int(size)

    def _draft_vocab_size(self) -> int:
        if "lm_head.weight" in self.weights:
            return int(self._from_weights("draft_vocab_size", self.weights["lm_head.weight"].shape[0]))
        if self.version == 1:
            self._from_weights("draft_vocab_size", "the target's", "drafts through the target's LM head")
            return self._vocab_size()
        raise ValueError(f"{self.folder} holds no lm_head.weight")

    def _rope(self, head_dim: int) -> dict[str, Any]:
        try:
            rope, known = read_rope(self.layer, head_dim)
        except ValueError as error:
            raise ValueError(f"{self.folder}/config.json: {error}") from None
        return self._record("rope", rope, "config" if known else "assumed")

    def _window(self) -> int | None:
        window, types = self.layer.get("sliding_window"), self.layer.get("layer_types")
        if window is None or self.layer.get("use_sliding_window") is False:
            return None
        if types and "sliding_attention" not in types:
            return None
        return int(self._record("sliding_window", window, "config"))

    def _draft_window(self) -> int | None:
        window = self.top.get("draft_window")
        return None if window is None else int(self._record("draft_window", window, "config"))

    def _flag(self, name: str, default: bool, note: str = "") -> bool:
        return bool(self._from_config(name, self._first(name), default, note))
