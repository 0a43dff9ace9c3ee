"""`BlockReader`: infers a `DFlashConfig` from a checkpoint's weights and config.json, else from defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from specdec.heads.dflash.config import DFlashConfig
from specdec.heads.dflash.convolution import ConvolutionShape
from specdec.heads.dflash.domino import DominoShape
from specdec.heads.dflash.selector import SelectorShape
from specdec.heads.eagle3.config_reader import ConfigReader


class BlockReader(ConfigReader):
    """Builds a `DFlashConfig`. Arguments as for `ConfigReader`."""

    def __init__(self, folder: Path, config: dict[str, Any], weights: Mapping[str, Tensor], names: Sequence[str]):
        super().__init__(folder, config, weights, names, nested=("dflash_config", "dspark_config"))

    def config(self) -> DFlashConfig:  # type: ignore[override]
        weights, layers, seen = self.weights, self._layers(), self._from_weights
        taps = self._entering()
        target_hidden, rest = divmod(weights["fc.weight"].shape[1], len(taps))
        if rest:
            raise ValueError(
                f"{self.folder}: fc.weight takes {weights['fc.weight'].shape[1]} values, which are not {len(taps)} "
                "states of equal width"
            )
        own_head = bool(seen("own_head", "lm_head.weight" in weights))
        windows, vocab_size = self._windows(layers["num_layers"]), self._known_vocabulary()
        markov, confidence = weights.get("markov_head.markov_w1.weight"), weights.get("confidence_head.proj.weight")
        softcap = self._first("final_logit_softcapping")
        deep = self.format == "DeepSpec"
        return DFlashConfig(
            **layers,
            vocab_size=vocab_size,
            draft_vocab_size=self._drafted_vocabulary(own_head, vocab_size),
            target_hidden_size=seen("target_hidden_size", target_hidden),
            own_embedding=seen("own_embedding", "embed_tokens.weight" in weights),
            own_head=own_head,
            mask_token_id=self._required("mask_token_id"),
            tap_ids=taps,
            block_size=self._required("block_size"),
            from_anchor=self._from_config(
                "from_anchor",
                self._first("sample_from_anchor", "shift_label"),
                deep,
                f"as {'DeepSpec' if deep else 'vLLM'} does",
            ),
            windows=windows,
            window_from_anchor=self.speculators and any(windows),
            causal=self._causal(any(windows)),
            markov=None if markov is None else self._markov(),
            markov_rank=0 if markov is None else seen("markov_rank", markov.shape[1]),
            domino=self._domino(),
            selector=self._selector(),
            convolution=self._convolution(layers["hidden_size"]),
            embedding_scale=self._scale("embedding_scale", "input_embedding_scale"),
            logit_scale=self._scale("logit_scale", "output_multiplier"),
            logit_softcap=self._record("logit_softcap", float(softcap), "config") if softcap else None,
            confidence=seen("confidence", confidence is not None),
            confidence_with_markov=confidence is not None
            and seen("confidence_with_markov", confidence.shape[1] > layers["hidden_size"]),
        )

    def _layout_name(self, names: Sequence[str]) -> str:
        if self.speculators:
            return "vLLM speculators"
        if any(name.startswith("encoder.") for name in names):
            return "transformers"
        return "DeepSpec" if "DSpark" in " ".join(map(str, self.top.get("architectures") or ())) else "z-lab"

    def _entering(self) -> tuple[int, ...]:
        """Return the taps as states entering layers.

        The speculators layout counts states that enter layers, the others those that leave them (-1: the embedding).
        """
        ids, source = self._first("aux_hidden_state_layer_ids" if self.speculators else "target_layer_ids"), "config"
        if ids is None and not self.speculators and self.top.get("num_target_layers"):
            ids, source = _spaced_layers(self.top["num_target_layers"], self.layer["num_hidden_layers"]), "assumed"
        if not ids:
            raise ValueError(
                f"{self.folder}/config.json does not say which of the target's states are read: add target_layer_ids, "
                "or aux_hidden_state_layer_ids in the speculators layout"
            )
        taps = tuple(int(i) + (not self.speculators) for i in ids)
        note = "as states enter layers" if self.speculators else f"{list(ids)} leave layers"
        self._record("taps", list(taps), source, note)
        return taps

    def _windows(self, layers: int) -> tuple[int | None, ...]:
        """Return the window of each layer in positions back.

        In the z-lab and DeepSpec layouts a window includes the token itself, in the other two it does not.
        """
        window, types = self.layer.get("sliding_window"), self.layer.get("layer_types")
        if types is None:  # as transformers' Qwen3 has it, and its own drafter (5.23)
            first = 0 if self.format == "transformers" else self.layer.get("max_window_layers", 28)
            types = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
        if len(types) < layers:
            raise ValueError(f"{self.folder}/config.json has {len(types)} layer_types for {layers} layers")
        back = None
        if window is not None and self.layer.get("use_sliding_window") is not False:
            back = int(window) - (self.format in ("z-lab", "DeepSpec"))
        found = tuple(back if kind == "sliding_attention" else None for kind in types[:layers])
        if any(found):
            self._record("windows", found, "config", "positions back from the anchor" if self.speculators else "")
        return found

    def _causal(self, windowed: bool) -> Any:
        """Return which layers are causal within the block. windowed: whether any layer has a window.

        A field for all layers comes first: JetSpec's, z-lab's or vLLM's. Without it, windows are causal in the z-lab
        layout, and in that of speculators' `dflash` unless a field says otherwise.
        """
        stated = self._first("causal_head")
        stated = self._first("is_causal", "causal") if stated is None else stated
        opposite = self._first("sliding_window_non_causal") if self.speculators else None
        found, kind = "none", self.top.get("speculators_model_type")
        if stated is not None:
            found = "all" if stated else "none"
        elif opposite is not None:
            found = "windows" if windowed and not opposite else "none"
        elif windowed and self.format in ("vLLM speculators", "z-lab") and kind != "dflash2":
            found = "windows"
        return self._record("causal", found, "assumed" if stated is None and opposite is None else "config")

    def _known_vocabulary(self) -> int:
        """Return the vocabulary's size, or 0 for the target's if neither a tensor nor the config gives it."""
        names = ("embed_tokens", "markov_head.markov_w1", "candidate_selector.predecessor_codebook")
        for name in (f"{name}.weight" for name in names):
            if name in self.weights:
                return int(self._from_weights("vocab_size", self.weights[name].shape[0]))
        size = self.layer.get("vocab_size") or self.top.get("vocab_size")
        return int(self._from_config("vocab_size", size or None, 0, "the target's"))

    def _drafted_vocabulary(self, own_head: bool, vocab_size: int) -> int:
        if own_head:
            return int(self._from_weights("draft_vocab_size", self.weights["lm_head.weight"].shape[0]))
        size = self._first("draft_vocab_size")
        if size not in (None, vocab_size):
            raise ValueError(f"{self.folder} drafts {size} of {vocab_size} tokens and lacks lm_head.weight")
        self._from_weights("draft_vocab_size", "the target's", "drafts through the target's LM head")
        return vocab_size

    def _domino(self) -> DominoShape | None:
        gates = self.weights.get("domino_head.input_gates.weight")
        if gates is None:
            return None
        size = self._from_weights("domino_state", len(gates) // 3, "width of the GRU's state")
        rank = self._from_weights("domino_rank", len(self._weight("domino_head.down_proj.weight")))
        return DominoShape(size, rank, self._from_config("uncorrected", self._first("pure_draft_prefix_len"), 0))

    def _selector(self) -> SelectorShape | None:
        codes = self.weights.get("candidate_selector.predecessor_codebook.weight")
        if codes is None:
            return None
        return SelectorShape(self._from_weights("selector_rank", codes.shape[1]), self._required("selector_top_k"))

    def _convolution(self, hidden_size: int) -> ConvolutionShape | None:
        if "layers.0.attention_conv.base_kernel" not in self.weights:
            return None
        size = self.weights["layers.0.attention_conv.base_kernel"].shape[1]
        groups = len(self._weight("layers.0.attention_conv.kernel_projection.weight")) // (2 * size)
        self._from_weights("convolution", [size, hidden_size // groups], "tokens, channels per group")
        return ConvolutionShape(size, hidden_size // groups)

    def _scale(self, name: str, field: str) -> float:
        stated = self._first(field)
        return 1.0 if stated is None else float(self._record(name, stated, "config"))

    def _markov(self) -> Any:
        parts = {"gated": "gate_proj", "rnn": "joint_proj"}
        kinds = [kind for kind, name in parts.items() if f"markov_head.{name}.weight" in self.weights]
        return self._from_weights("markov", kinds[0] if kinds else "vanilla")


def _spaced_layers(target_layers: int, layers: int) -> list[int]:
    """Return the layers that z-lab's drafters take the target's states from by default."""
    if layers == 1:
        return [target_layers // 2]
    first, last = 1, target_layers - 3
    return [round(first + i * (last - first) / (layers - 1)) for i in range(layers)]
