"""`read_rope`: parses the RoPE fields of a head's config.json into `rope_parameters` of transformers.

Published configs have `rope_parameters`, `rope_scaling` with "type" or "rope_type", null, or one rotation per layer
type. transformers computes the frequencies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specdec.heads.config import LayerConfig

BASE = 10000.0
# Multimodal RoPE gives a text token the same position in all three sections, which equals plain RoPE.
OTHER_NAMES = {"mrope": "default", "su": "longrope"}
REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
PLAIN = ("rope_type", "rope_theta", "partial_rotary_factor")
STRETCHED = ("yarn", "longrope", "llama3")  # types that extend an original context length


def read_rope(layer: Mapping[str, Any], head_dim: int) -> tuple[dict[str, Any], bool]:
    """Parse the RoPE parameters of a head.

    Args:
        layer: the part of a config.json that describes the head's layers.
        head_dim: width of an attention head.

    Returns:
        `rope_parameters`, and whether the config gives their base. The base defaults to 10000, never to the target's.

    Raises:
        ValueError: a field is missing, wrong or unknown. The message names it.
    """
    rope = {"rope_type": "default", **_part(layer, "rope_scaling"), **_part(layer, "rope_parameters")}
    rope["rope_type"] = kind = OTHER_NAMES.get(rope["rope_type"], rope["rope_type"])
    if kind != "default" and kind not in ROPE_INIT_FUNCTIONS:
        known = ", ".join(["default", *ROPE_INIT_FUNCTIONS, *OTHER_NAMES])
        raise ValueError(f"rope_scaling or rope_parameters has the unknown type {kind!r}, expected one of {known}")
    theta = rope.get("rope_theta", layer.get("rope_theta"))
    rope["rope_theta"] = BASE if theta is None else float(theta)
    if layer.get("partial_rotary_factor") is not None:
        rope.setdefault("partial_rotary_factor", layer["partial_rotary_factor"])
    if kind in STRETCHED:
        _fill_length(rope, layer)
    if kind == "dynamic" and "alpha" in rope:  # HunYuan's variant: a larger base, whatever the length
        turned = _covered(rope, head_dim)
        rope |= {"rope_type": "default", "rope_theta": rope["rope_theta"] * rope["alpha"] ** (turned / (turned - 2))}
    if rope["rope_type"] == "default":
        rope = {name: value for name, value in rope.items() if name in PLAIN}
    _check(rope, head_dim)
    return rope, theta is not None


def rotary_config(config: LayerConfig) -> LlamaConfig:
    """Return a Llama config from which transformers computes the frequencies, for every type of scaling."""
    rope: dict[str, Any] = dict(config.rope)
    covered = config.head_dim
    if rope.get("rope_type") != "proportional":  # "proportional" covers all dimensions, some with frequency 0
        covered = _covered(rope, covered)
        rope.pop("partial_rotary_factor", None)
    return LlamaConfig(
        hidden_size=covered,
        num_attention_heads=1,
        head_dim=covered,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=rope,
    )


def _part(layer: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return one of the two fields without null and multimodal entries, with "type" renamed to "rope_type"."""
    given = layer.get(name) or {}
    if not isinstance(given, Mapping):
        raise ValueError(f"{name} must be an object or null, got {given!r}")
    by_layers = {kind: rope for kind, rope in given.items() if isinstance(rope, Mapping)}
    if by_layers:
        given = _shared(name, by_layers, layer)
    fields = {key: value for key, value in given.items() if value is not None and not key.startswith("mrope")}
    older = fields.pop("type", None)
    return fields if older is None else {"rope_type": older, **fields}


def _shared(name: str, by_layers: Mapping[str, Mapping[str, Any]], layer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the one rotation that all layers of the head share, from those given per layer type."""
    types = [kind for kind in layer.get("layer_types") or by_layers if kind in by_layers]
    first, *others = [by_layers[kind] for kind in types] or by_layers.values()
    if any(other != first for other in others):
        raise ValueError(
            f"{name} gives the layer types {', '.join(dict.fromkeys(types))} different rotations, but all layers of a "
            f"head must share one: keep only one of them in {name}"
        )
    return first


def _fill_length(rope: dict[str, Any], layer: Mapping[str, Any]) -> None:
    """Fill in the original length if it is outside of `rope` (Phi-3), and yarn's factor if only lengths are given."""
    length = layer.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    if length is not None:
        rope["original_max_position_embeddings"] = length
        if rope["rope_type"] == "yarn" and layer.get("max_position_embeddings"):
            rope.setdefault("factor", layer["max_position_embeddings"] / length)


def _check(rope: Mapping[str, Any], head_dim: int) -> None:
    """Raise ValueError if a parameter that the RoPE type requires is missing or wrong."""
    kind = rope["rope_type"]
    for name in REQUIRED.get(kind, ()):
        if name not in rope:
            raise ValueError(f"RoPE of type {kind!r} lacks {name}: add it to rope_scaling or rope_parameters")
        values = rope[name] if kind == "longrope" else [rope[name]]
        if not isinstance(values, list) or not all(isinstance(value, (int, float)) for value in values):
            raise ValueError(f"{name} of RoPE must be {'a list of numbers' if kind == 'longrope' else 'a number'}")
        if kind == "longrope" and len(values) != _covered(rope, head_dim) // 2:
            raise ValueError(
                f"{name} of RoPE has {len(values)} numbers with a head_dim of {head_dim}, expected "
                f"{_covered(rope, head_dim) // 2}"
            )


def _covered(rope: Mapping[str, Any], head_dim: int) -> int:
    """Return how many dimensions of an attention head RoPE rotates."""
    return int(head_dim * rope.get("partial_rotary_factor", 1.0))
