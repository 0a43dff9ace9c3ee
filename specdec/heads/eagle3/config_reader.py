"""`ConfigReader`: infers an `Eagle3Config` from a checkpoint's weights and config.json, else from defaults.

The names and shapes of the weights take precedence over the config. Facts that neither gives are assumed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from specdec.heads.config_fields import Field
from specdec.heads.eagle3.config import Eagle3Config
from specdec.heads.rope import read_rope

LAYER = re.compile(r"layers\.(\d+)\.")
PARALLEL_TOKENS = 8  # tokens that a P-EAGLE head drafts per pass if its config does not say: the speculators default


class ConfigReader:
    """Builds an `Eagle3Config`, recording the source of each fact in `fields`.

    Args:
        folder: the checkpoint's folder, for error messages.
        config: content of config.json.
        weights: tensors by specdec's names.
        names: the checkpoint's names of these tensors.
    """

    def __init__(self, folder: Path, config: dict[str, Any], weights: Mapping[str, Tensor], names: list[str]):
        self.folder, self.weights = folder, weights
        self.top = config
        self.layer: dict[str, Any] = config.get("transformer_layer_config") or config
        self.nested: dict[str, Any] = config.get("eagle_config") or {}
        self.fields: list[Field] = []
        self.version = 3 if "layers.0.hidden_norm.weight" in weights else 1
        self.format = self._format(names)

    def config(self) -> Eagle3Config:
        weights = self.weights
        H, wide = weights["fc.weight"].shape
        taps, convention, known = self._taps()
        num_taps = len(taps) if taps else 3
        target_hidden = self._seen("target_hidden_size", H if self.version == 1 else wide // num_taps)
        if self.version == 3 and target_hidden * num_taps != wide:
            raise ValueError(
                f"{self.folder}: fc.weight takes {wide} values, which are not {num_taps} states of equal width"
            )
        masked = "mask_hidden" in weights
        return Eagle3Config(
            **self._layers(),
            vocab_size=self._vocab_size(),
            draft_vocab_size=self._draft_vocab_size(),
            target_hidden_size=target_hidden,
            sliding_window=self._window(),
            tap_ids=taps,
            tap_convention=convention,
            tap_convention_known=known,
            version=self._seen("version", self.version),
            norm_before_fc=self._seen("norm_before_fc", "input_norm.weight" in weights),
            fc_norm=self._seen("fc_norm", "fc_norm.0.weight" in weights),
            norm_before_residual=self._norm_before_residual(),
            norm_output=self._norm_output(),
            fc_bias=self._seen("fc_bias", "fc.bias" in weights),
            own_embedding=self._seen("own_embedding", "embed_tokens.weight" in weights),
            mask_token_id=self._mask_token_id() if masked else None,
            block_size=self._parallel_tokens() if masked else 1,
        )

    def _layers(self) -> dict[str, Any]:
        """Infer the fields of `LayerConfig` that describe the decoder layers."""
        weights = self.weights
        q = self._weight("layers.0.self_attn.q_proj.weight").shape[0]
        kv = self._weight("layers.0.self_attn.k_proj.weight").shape[0]
        qk_norm = "layers.0.self_attn.q_norm.weight" in weights
        heads = self.layer.get("num_attention_heads")
        if qk_norm:
            head_dim = self._seen("head_dim", len(weights["layers.0.self_attn.q_norm.weight"]))
        else:
            head_dim = self.layer.get("head_dim") or (q // heads if heads else None)
            if head_dim is None:
                raise ValueError(f"{self.folder}/config.json has neither num_attention_heads nor head_dim: add one")
            self._note("head_dim", head_dim, "config" if self.layer.get("head_dim") else "weights")
        if q % head_dim or kv % head_dim:
            raise ValueError(f"{self.folder}: head_dim {head_dim} does not divide the projections' {q} and {kv} rows")
        layers = 1 + max(int(found[1]) for name in weights if (found := LAYER.match(name)))
        said_layers = self.layer.get("num_hidden_layers")
        note = f"the config says {said_layers}" if said_layers not in (None, layers) else ""
        return {
            "hidden_size": self._seen("hidden_size", weights["fc.weight"].shape[0]),
            "intermediate_size": self._seen(
                "intermediate_size", self._weight("layers.0.mlp.gate_proj.weight").shape[0]
            ),
            "num_attention_heads": self._seen("num_attention_heads", q // head_dim),
            "num_key_value_heads": self._seen("num_key_value_heads", kv // head_dim),
            "head_dim": head_dim,
            "num_layers": self._seen("num_layers", layers, note),
            "rms_norm_eps": self._said_or("rms_norm_eps", self.layer, 1e-6),
            "hidden_act": self._said_or("hidden_act", self.layer, "silu"),
            "attention_bias": self._seen("attention_bias", "layers.0.self_attn.q_proj.bias" in weights),
            "output_bias": self._seen("output_bias", "layers.0.self_attn.o_proj.bias" in weights),
            "mlp_bias": self._seen("mlp_bias", "layers.0.mlp.gate_proj.bias" in weights),
            "qk_norm": self._seen("qk_norm", qk_norm),
            "rope": self._rope(head_dim),
            "max_position_embeddings": self._said_or("max_position_embeddings", self.layer, 4096),
        }

    def _mask_token_id(self) -> int:
        """Return the mask token of a head that drafts several tokens per pass."""
        token = next((d["mask_token_id"] for d in (self.top, self.nested) if d.get("mask_token_id") is not None), None)
        if token is None:
            raise ValueError(f"{self.folder}/config.json has no mask_token_id")
        return int(self._note("mask_token_id", token, "config"))

    def _parallel_tokens(self) -> int:
        """Return the number of tokens per pass that a P-EAGLE head was trained for."""
        methods = (self.top.get("speculators_config") or {}).get("proposal_methods") or [{}]
        tokens = methods[0].get("speculative_tokens")
        return int(self._note("block_size", tokens or PARALLEL_TOKENS, "config" if tokens else "assumed"))

    def _format(self, names: list[str]) -> str:
        if "speculators_model_type" in self.top:
            return "vLLM speculators"
        if self.version == 1:
            return "SafeAILab EAGLE-1 or 2"
        if any(name.startswith("layers.0.") for name in names):
            return "ModelOpt"
        if self.nested:
            return "SpecForge, SGLang or ModelOpt"
        return "SafeAILab EAGLE-3"

    def _taps(self) -> tuple[tuple[int, ...] | None, str, bool]:
        if self.version == 1:
            self._note("taps", "the target's final state", "weights")
            return None, "entering", True
        names = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "target_layer_ids")
        ids = next((d[name] for d in (self.top, self.nested) for name in names if d.get(name)), None)
        if ids is None:
            self._note("taps", "low, middle and high", "assumed", "states entering layers 2, n // 2 and n - 3 of n")
            return None, "entering", True
        self._note("taps", list(ids), "config")
        said = self.top.get("tap_convention")
        usual = "entering" if self.format == "vLLM speculators" else "output"
        convention = said or self.top.get("tap_convention_assumed") or usual
        how = "config" if said else "assumed"
        note = "" if said else "overridden by the target's number of layers if one convention gives the paper's taps"
        self._note("tap_convention", convention, how, note)
        return tuple(int(i) for i in ids), convention, bool(said)

    def _vocab_size(self) -> int:
        if "embed_tokens.weight" in self.weights:
            return int(self._seen("vocab_size", self.weights["embed_tokens.weight"].shape[0]))
        size = self.layer.get("vocab_size") or self.top.get("vocab_size")
        if not size:
            raise ValueError(f"{self.folder}/config.json has no vocab_size")
        return int(size)

    def _draft_vocab_size(self) -> int:
        if "lm_head.weight" in self.weights:
            return int(self._seen("draft_vocab_size", self.weights["lm_head.weight"].shape[0]))
        if self.version == 1:
            self._note("draft_vocab_size", "the target's", "weights", "drafts through the target's LM head")
            return self._vocab_size()
        raise ValueError(f"{self.folder} holds no lm_head.weight")

    def _rope(self, head_dim: int) -> dict[str, Any]:
        try:
            rope, known = read_rope(self.layer, head_dim)
        except ValueError as error:
            raise ValueError(f"{self.folder}/config.json: {error}") from None
        return self._note("rope", rope, "config" if known else "assumed")

    def _window(self) -> int | None:
        window = self.layer.get("sliding_window")
        if window is None or self.layer.get("use_sliding_window") is False:
            return None
        types = self.layer.get("layer_types")
        if types and "sliding_attention" not in types:
            return None
        return int(self._note("sliding_window", window, "config"))

    def _norm_before_residual(self) -> bool:
        said = self._flag("norm_before_residual")
        if said is not None:
            return said
        speculators = self.format == "vLLM speculators"
        return bool(
            self._note("norm_before_residual", speculators, "assumed", "as vLLM does" if speculators else "the paper's")
        )

    def _norm_output(self) -> bool:
        said = self._flag("norm_output")
        if said is not None:
            return said
        newer = "fc_norm.0.weight" in self.weights
        return bool(self._note("norm_output", newer, "assumed", "EAGLE-3.1, as it has fc_norm" if newer else "EAGLE-3"))

    def _flag(self, name: str) -> bool | None:
        for place in (self.top, self.nested):
            if place.get(name) is not None:
                return bool(self._note(name, bool(place[name]), "config"))
        return None

    def _weight(self, name: str) -> Tensor:
        if name not in self.weights:
            raise ValueError(f"{self.folder} lacks {name}")
        return self.weights[name]

    def _said_or(self, name: str, place: Mapping[str, Any], default: Any) -> Any:
        value = place.get(name)
        return self._note(name, default if value is None else value, "assumed" if value is None else "config")

    def _seen(self, name: str, value: Any, note: str = "") -> Any:
        return self._note(name, value, "weights", note)

    def _note(self, name: str, value: Any, source: str, note: str = "") -> Any:
        if all(known.name != name for known in self.fields):
            self.fields.append(Field(name, value, source, note))
        return value
