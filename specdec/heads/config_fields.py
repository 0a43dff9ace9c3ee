"""Fields of a head's config.json: `FIELDS`, the kind of value that each may hold, and `FieldReader`, which reads them.

`read_head_config` checks every field of this table that is present and not null. Other fields are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

from torch import Tensor
from transformers.activations import ACT2FN

from specdec.heads.files import read_config

LARGEST = 2**31 - 1


@dataclass(frozen=True)
class Kind:
    """Kind of value: a description for error messages, and a predicate."""

    description: str
    accepts: Callable[[Any], bool]


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= LARGEST


def _number(value: Any, most: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= most  # NaN is not


def _list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)


COUNT = Kind(f"an integer from 1 to {LARGEST}", lambda value: _whole(value, 1))
INDEX = Kind(f"an integer from 0 to {LARGEST}", lambda value: _whole(value, 0))
LAYERS = Kind("a list of integers from -1", lambda value: isinstance(value, list) and all(_whole(i, -1) for i in value))
SHARE = Kind("a number from 0 to 1", lambda value: _number(value, 1))
BASE = Kind("a number from 1 to 1e18", lambda value: _number(value, 1e18) and value >= 1)
FACTOR = Kind("a number from 0 to 1e18", lambda value: _number(value, 1e18))
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
NAME = Kind("a string", lambda value: isinstance(value, str))
NAMES = Kind("a list of strings", lambda value: _list_of(str, value))
ACTIVATION = Kind(f"one of {', '.join(sorted(ACT2FN))}", lambda value: isinstance(value, str) and value in ACT2FN)
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
OBJECTS = Kind("a list of objects", lambda value: _list_of(dict, value))

FIELDS = {
    **dict.fromkeys(("num_attention_heads", "head_dim", "num_hidden_layers", "max_position_embeddings"), COUNT),
    **dict.fromkeys(("block_size", "speculative_tokens", "num_target_layers", "draft_vocab_size"), COUNT),
    **dict.fromkeys(("hydra_num_heads", "hydra_num_layers", "medusa_num_heads", "num_heads"), COUNT),
    **dict.fromkeys(("vocab_size", "mask_token_id", "sliding_window", "max_window_layers"), INDEX),
    **dict.fromkeys(("hidden_state_offset", "pure_draft_prefix_len"), INDEX),
    **dict.fromkeys(("draft_window", "selector_top_k"), COUNT),
    "rms_norm_eps": SHARE,
    "partial_rotary_factor": SHARE,
    "rope_theta": BASE,
    **dict.fromkeys(("input_embedding_scale", "output_multiplier", "final_logit_softcapping"), FACTOR),
    **dict.fromkeys(("use_sliding_window", "sliding_window_non_causal", "grounded_heads"), FLAG),
    **dict.fromkeys(("causal", "causal_head", "is_causal"), FLAG),
    **dict.fromkeys(("norm_before_residual", "norm_output", "sample_from_anchor", "shift_label"), FLAG),
    **dict.fromkeys(("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "target_layer_ids"), LAYERS),
    **dict.fromkeys(("tap_convention", "tap_convention_assumed", "speculators_model_type", "hydra_head_arch"), NAME),
    **dict.fromkeys(("rope_type", "type"), NAME),
    **dict.fromkeys(("architectures", "layer_types"), NAMES),
    "hidden_act": ACTIVATION,
    **dict.fromkeys(("transformer_layer_config", "eagle_config", "dflash_config", "dspark_config"), OBJECT),
    **dict.fromkeys(("rope_parameters", "rope_scaling", "speculators_config"), OBJECT),
    "proposal_methods": OBJECTS,
}


def read_head_config(folder: Path) -> dict[str, Any]:
    """Read and check the config.json of a head.

    Raises:
        ValueError: the file is missing or not a JSON object, or a field holds a value that is not of its kind.
    """
    config = read_config(folder)
    within: list[tuple[str, Mapping[str, Any]]] = [("", config)]
    for path, fields in within:  # grows as it is read
        for name in fields.keys() & FIELDS.keys():
            value, kind = fields[name], FIELDS[name]
            if value is None:
                continue
            if not kind.accepts(value):
                raise ValueError(
                    f"{folder}/config.json: {path}{name} must be {kind.description}, it is {shortened(value)}: correct "
                    "the file, or download it again"
                )
            if kind is OBJECT:
                within.append((f"{path}{name}.", value))
            elif kind is OBJECTS:
                within += [(f"{path}{name}[{i}].", item) for i, item in enumerate(value)]
    return config


@dataclass(frozen=True)
class Field:
    """Fact about a head: its value, and where the value comes from."""

    name: str
    value: Any
    source: str  # "config", "weights" or "assumed"
    note: str = ""


class FieldReader:
    """Base of the readers that infer a head's config. Records the source of each fact in `fields`.

    Args:
        folder: the checkpoint's folder, for error messages.
        config: content of config.json.
        weights: tensors by specdec's names.
        nested: parts of the config that may hold a field, too.
    """

    def __init__(
        self, folder: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor], nested: Sequence[str] = ()
    ):
        self.folder, self.top, self.weights = folder, config, weights
        self.parts = [config, *(config.get(name) or {} for name in nested)]
        self.fields: list[Field] = []

    def _first(self, *names: str) -> Any:
        """Return the first of these fields that is set, in any part of the config."""
        return next((part[name] for part in self.parts for name in names if part.get(name) is not None), None)

    def _required(self, name: str) -> int:
        value = self._first(name)
        if value is None:
            raise ValueError(f"{self.folder}/config.json has no {name}")
        return int(self._record(name, value, "config"))

    def _from_config(self, name: str, value: Any, default: Any, note: str = "") -> Any:
        """Record a value of the config, or the default if it is None. note: reason for the default."""
        if value is None:
            return self._record(name, default, "assumed", note)
        return self._record(name, value, "config")

    def _from_weights(self, name: str, value: Any, note: str = "") -> Any:
        return self._record(name, value, "weights", note)

    def _record(self, name: str, value: Any, source: str, note: str = "") -> Any:
        if all(known.name != name for known in self.fields):
            self.fields.append(Field(name, value, source, note))
        return value

    def _weight(self, name: str) -> Tensor:
        if name not in self.weights:
            raise ValueError(f"{self.folder} lacks {name}")
        return self.weights[name]
