"""`BlockReader`: infers a `DFlashConfig` from a checkpoint's weights and config.json, else from defaults."""

from __future__ import annotations

from typing import Any

from specdec.heads.dflash.config import DFlashConfig
from specdec.heads.eagle3.config_reader import ConfigReader

NESTED = ("dflash_config", "dspark_config")


class BlockReader(ConfigReader):
    """Builds a `DFlashConfig`, recording the source of each fact."""

    def config(self) -> DFlashConfig:  # type: ignore[override]
        weights, layers = self.weights, self._layers()
        taps = self._entering()
        target_hidden, rest = divmod(weights["fc.weight"].shape[1], len(taps))
        if rest:
            raise ValueError(
                f"{self.folder}: fc.weight takes {weights['fc.weight'].shape[1]} values, which are not {len(taps)} "
                "states of equal width"
            )
        own_head = bool(self._seen("own_head", "lm_head.weight" in weights))
        windows = self._windows(layers["num_layers"])
        vocab_size = self._known_vocabulary()
        markov = "markov_head.markov_w1.weight" in weights
        return DFlashConfig(
            **layers,
            vocab_size=vocab_size,
            draft_vocab_size=self._drafted_vocabulary(own_head, vocab_size),
            target_hidden_size=self._seen("target_hidden_size", target_hidden),
            own_embedding=self._seen("own_embedding", "embed_tokens.weight" in weights),
            own_head=own_head,
            mask_token_id=self._mask_token_id(),
            tap_ids=taps,
            block_size=self._block_size(),
            from_anchor=self._from_anchor(),
            windows=windows,
            window_from_anchor=self._speculators and any(windows),
            causal_windows=self._causal_windows() if any(windows) else False,
            markov=self._markov() if markov else None,
            markov_rank=self._seen("markov_rank", weights["markov_head.markov_w1.weight"].shape[1]) if markov else 0,
            confidence=self._seen("confidence", "confidence_head.proj.weight" in weights),
            confidence_with_markov=self._confidence_with_markov(layers["hidden_size"]),
        )

    @property
    def _speculators(self) -> bool:
        return "speculators_model_type" in self.top

    def _format(self, names: list[str]) -> str:
        architectures = " ".join(map(str, self.top.get("architectures") or ()))
        if self._speculators:
            return "vLLM speculators"
        if any(name.startswith("encoder.") for name in names):
            return "transformers"
        return "DeepSpec" if "DSpark" in architectures else "z-lab"

    def _said(self, *names: str) -> Any:
        """Return the first of these fields that is set, at the top level or in a nested config of the drafter."""
        places = (self.top, *(self.top.get(name) or {} for name in NESTED))
        return next((place[name] for place in places for name in names if place.get(name) is not None), None)

    def _entering(self) -> tuple[int, ...]:
        """Return the taps as states entering layers.

        The speculators layout counts states that enter layers, the others those that leave them (-1: the embedding).
        """
        ids = self._said("aux_hidden_state_layer_ids" if self._speculators else "target_layer_ids")
        source = "config"
        if ids is None and not self._speculators and self.top.get("num_target_layers"):
            ids, source = _spaced_layers(self.top["num_target_layers"], self.layer["num_hidden_layers"]), "assumed"
        if not ids:
            raise ValueError(
                f"{self.folder}/config.json does not say which of the target's states are read: add target_layer_ids, "
                "or aux_hidden_state_layer_ids in the speculators layout"
            )
        shift = 0 if self._speculators else 1
        taps = tuple(int(i) + shift for i in ids)
        self._note("taps", list(taps), source, "as states enter layers" if shift == 0 else f"{list(ids)} leave layers")
        return taps

    def _mask_token_id(self) -> int:
        token = self._said("mask_token_id")
        if token is None:
            raise ValueError(f"{self.folder}/config.json has no mask_token_id")
        return int(self._note("mask_token_id", token, "config"))

    def _block_size(self) -> int:
        size = self._said("block_size")
        if size is None:
            raise ValueError(f"{self.folder}/config.json has no block_size")
        return int(self._note("block_size", size, "config"))

    def _from_anchor(self) -> bool:
        """Return whether the anchor's output drafts. It does in DeepSpec's drafters, unless the config denies it."""
        said = self._said("sample_from_anchor", "shift_label")
        if said is not None:
            return bool(self._note("from_anchor", bool(said), "config"))
        deep = self.format == "DeepSpec"
        return bool(self._note("from_anchor", deep, "assumed", f"as {'DeepSpec' if deep else 'vLLM'} does"))

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
        if window is None or self.layer.get("use_sliding_window") is False:
            window = None
        back = None if window is None else int(window) - (self.format in ("z-lab", "DeepSpec"))
        found = tuple(back if kind == "sliding_attention" else None for kind in types[:layers])
        if any(found):
            self._note("windows", found, "config", "positions back from the anchor" if self._speculators else "")
        return found

    def _causal_windows(self) -> bool:
        if self._speculators:
            said = self._said("sliding_window_non_causal")
            return bool(self._note("causal_windows", not said, "assumed" if said is None else "config"))
        said = self._said("causal")
        return bool(self._note("causal_windows", bool(said), "assumed" if said is None else "config"))

    def _known_vocabulary(self) -> int:
        """Return the vocabulary's size, or 0 for the target's if neither a tensor nor the config gives it."""
        for name in ("embed_tokens.weight", "markov_head.markov_w1.weight"):
            if name in self.weights:
                return int(self._seen("vocab_size", self.weights[name].shape[0]))
        size = self.layer.get("vocab_size") or self.top.get("vocab_size") or 0
        return int(self._note("vocab_size", size, "config" if size else "assumed", "" if size else "the target's"))

    def _drafted_vocabulary(self, own_head: bool, vocab_size: int) -> int:
        if own_head:
            return int(self._seen("draft_vocab_size", self.weights["lm_head.weight"].shape[0]))
        said = self._said("draft_vocab_size")
        if said not in (None, vocab_size):
            raise ValueError(f"{self.folder} drafts {said} of {vocab_size} tokens and lacks lm_head.weight")
        self._note("draft_vocab_size", "the target's", "weights", "drafts through the target's LM head")
        return vocab_size

    def _markov(self) -> Any:
        for kind, name in (("gated", "gate_proj"), ("rnn", "joint_proj")):
            if f"markov_head.{name}.weight" in self.weights:
                return self._seen("markov", kind)
        return self._seen("markov", "vanilla")

    def _confidence_with_markov(self, hidden_size: int) -> bool:
        weight = self.weights.get("confidence_head.proj.weight")
        return bool(weight is not None and self._seen("confidence_with_markov", weight.shape[1] > hidden_size))


def _spaced_layers(target_layers: int, layers: int) -> list[int]:
    """Return the layers that z-lab's drafters take the target's states from by default."""
    if layers == 1:
        return [target_layers // 2]
    first, last = 1, target_layers - 3
    return [round(first + i * (last - first) / (layers - 1)) for i in range(layers)]
