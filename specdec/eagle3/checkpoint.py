"""Checkpoints of EAGLE heads: reading whatever a folder holds, strictly, and writing the two common layouts and ours.

Owns files and names. A head is understood from its weights first (their names and shapes cannot lie), from its config
second; what neither says is assumed, and `Checkpoint.fields` tells which was which. Formats: SafeAILab EAGLE-1 to 3,
SpecForge and SGLang, vLLM speculators, ModelOpt.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdec.eagle3.config import Eagle3Config
from specdec.eagle3.head import Eagle3Head
from specdec.paths import require_folder_or_id

LAYOUTS = ("sglang", "speculators", "int8")
SCALE = "_scale"  # behind the name of a matrix of int8
# Names that carry nothing a head computes with.
IGNORED = {
    "t2d": "the inverse of d2t",
    "rotary_emb.inv_freq": "computed from the config",
    "verifier_lm_head.weight": "the target's own",
    "verifier_norm.weight": "the target's own",
}


@dataclass(frozen=True)
class Field:
    """One fact about a head: its value, and whether the config said so, the weights did, or it was assumed."""

    name: str
    value: Any
    source: str  # "config", "weights" or "assumed"
    note: str = ""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as it was understood.

    Attributes:
        format: whose layout it is. fields: what is known of the head, and how.
        used: its names of the tensors in use. ignored: those left out, with the reason. weights: by our names.
    """

    path: Path
    format: str
    config: Eagle3Config
    fields: tuple[Field, ...]
    used: dict[str, tuple[int, ...]]
    ignored: dict[str, str]
    weights: dict[str, Tensor]

    def head(self) -> Eagle3Head:
        """The head, in the precision it was saved in; bfloat16 if that was int8."""
        with torch.device("meta"):
            head = Eagle3Head(self.config)
        expected = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
        missing = sorted(expected.keys() - self.weights.keys())
        if missing:
            raise ValueError(f"{self.path} lacks {', '.join(missing)}")
        unplaced = sorted(self.weights.keys() - expected.keys())
        if unplaced:
            raise ValueError(f"{self.path} holds {', '.join(unplaced)}, which this kind of head has no place for")
        for name, tensor in self.weights.items():
            if tuple(tensor.shape) != expected[name]:
                raise ValueError(
                    f"{self.path}: {name} has shape {tuple(tensor.shape)}, its config and the other weights ask for "
                    f"{expected[name]}"
                )
        dtype = self.weights["fc.weight"].dtype
        head.load_state_dict(
            {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in self.weights.items()},
            assign=True,
        )
        return head.requires_grad_(False).eval()


def load(path: str | Path) -> Eagle3Head:
    """A head from a folder or hub id, in any of the formats."""
    return read(path).head()


def read(path: str | Path) -> Checkpoint:
    """Understand the checkpoint in a folder, or of a hub id (downloaded first). Nothing in it is executed."""
    folder = _folder(path)
    config = _read_config(folder)
    stored = _read_tensors(folder)
    tensors, scales = _of_int8(stored, folder)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{folder}: {name} holds NaN or infinite values; the file is damaged or its training was")
    weights: dict[str, Tensor] = {}
    used = {name: tuple(scale.shape) for name, scale in scales.items()}
    ignored: dict[str, str] = {}
    for name, tensor in tensors.items():
        plain = name.removeprefix("model.")
        reason = next((why for end, why in IGNORED.items() if plain == end or plain.endswith("." + end)), None)
        if reason:
            ignored[name] = reason
            continue
        ours = plain.replace("midlayer.", "layers.0.", 1) if plain.startswith("midlayer.") else plain
        if ours in weights:
            raise ValueError(f"{folder}: two tensors are {ours}: {name} and another")
        weights[ours] = tensor
        used[name] = tuple(tensor.shape)
    if "fc.weight" not in weights:
        raise ValueError(f"{folder} holds no fc.weight: it is not an EAGLE head")
    reader = _Reader(folder, config, weights, list(used))
    understood = reader.config()
    if understood.draft_vocab_size == understood.vocab_size or understood.version == 1:
        weights.setdefault("d2t", torch.zeros(understood.draft_vocab_size, dtype=torch.long))
    _check_vocabulary(folder, weights.get("d2t"), understood)
    format = "specdec's own, 8-bit" if scales else reader.format
    return Checkpoint(folder, format, understood, tuple(reader.fields), used, ignored, weights)


class _Reader:
    """Puts an `Eagle3Config` together, noting where each fact comes from."""

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
        q = self._weight("layers.0.self_attn.q_proj.weight").shape[0]
        kv = self._weight("layers.0.self_attn.k_proj.weight").shape[0]
        qk_norm = "layers.0.self_attn.q_norm.weight" in weights
        heads = self.layer.get("num_attention_heads")
        if qk_norm:
            head_dim = self._seen("head_dim", len(weights["layers.0.self_attn.q_norm.weight"]))
        else:
            head_dim = self.layer.get("head_dim") or (q // heads if heads else None)
            if head_dim is None:
                raise ValueError(f"{self.folder}/config.json names neither num_attention_heads nor head_dim")
            self._note("head_dim", head_dim, "config" if self.layer.get("head_dim") else "weights")
        if q % head_dim or kv % head_dim:
            raise ValueError(f"{self.folder}: head_dim {head_dim} does not divide the projections' {q} and {kv} rows")
        taps, convention, known = self._taps()
        num_taps = len(taps) if taps else 3
        target_hidden = self._seen("target_hidden_size", H if self.version == 1 else wide // num_taps)
        if self.version == 3 and target_hidden * num_taps != wide:
            raise ValueError(f"{self.folder}: fc.weight takes {wide} values, which are not {num_taps} equal states")
        layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("layers."))
        said_layers = self.layer.get("num_hidden_layers")
        note = f"the config says {said_layers}" if said_layers not in (None, layers) else ""
        return Eagle3Config(
            hidden_size=self._seen("hidden_size", H),
            vocab_size=self._vocab_size(),
            draft_vocab_size=self._draft_vocab_size(),
            intermediate_size=self._seen("intermediate_size", self._weight("layers.0.mlp.gate_proj.weight").shape[0]),
            num_attention_heads=self._seen("num_attention_heads", q // head_dim),
            num_key_value_heads=self._seen("num_key_value_heads", kv // head_dim),
            head_dim=head_dim,
            target_hidden_size=target_hidden,
            num_layers=self._seen("num_layers", layers, note),
            rms_norm_eps=self._said_or("rms_norm_eps", self.layer, 1e-6),
            hidden_act=self._said_or("hidden_act", self.layer, "silu"),
            attention_bias=self._seen("attention_bias", "layers.0.self_attn.q_proj.bias" in weights),
            output_bias=self._seen("output_bias", "layers.0.self_attn.o_proj.bias" in weights),
            mlp_bias=self._seen("mlp_bias", "layers.0.mlp.gate_proj.bias" in weights),
            qk_norm=self._seen("qk_norm", qk_norm),
            rope=self._rope(),
            max_position_embeddings=self._said_or("max_position_embeddings", self.layer, 4096),
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
        )

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
        note = "" if said else "settled with the target if one way of counting gives the paper's layers"
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

    def _rope(self) -> dict[str, Any]:
        """Never the target's: the head's own config, base 10000 where it is silent."""
        given = dict(self.layer.get("rope_parameters") or {})
        scaling = self.layer.get("rope_scaling") or {}
        scaling = {("rope_type" if key == "type" else key): value for key, value in scaling.items()}
        rope = {"rope_type": "default", **scaling, **given}
        source = "config"
        if "rope_theta" not in rope:
            theta = self.layer.get("rope_theta")
            source = "config" if theta is not None else "assumed"
            rope["rope_theta"] = float(theta) if theta is not None else 10000.0
        if "partial_rotary_factor" not in rope and self.layer.get("partial_rotary_factor") is not None:
            rope["partial_rotary_factor"] = self.layer["partial_rotary_factor"]
        self._note("rope", rope, source)
        return rope

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


def save(head: Eagle3Head, folder: str | Path, layout: str = "sglang", target: str = "") -> None:
    """Write a head: config.json and model.safetensors.

    Args:
        layout: "sglang" (also SafeAILab's and SpecForge's: `midlayer.*`; their code knows no biases in attention and
            leaves them out), "speculators" (vLLM's: `layers.0.*`), or "int8", which specdec alone reads: half the
            size, matrices of int8 with a float32 scale per row.
        target: name or path of the target, which vLLM's layout wants to know.

    Raises:
        ValueError: unknown layout, not an EAGLE-3 head, or a folder that holds another model's weights.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    c = head.config
    if c.version != 3:
        raise ValueError("only EAGLE-3 heads can be exported: EAGLE-1 and 2 checkpoints have one layout already")
    folder = Path(folder)
    _refuse_others(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.contiguous().cpu() for name, tensor in head.state_dict().items()}
    if c.draft_vocab_size == c.vocab_size and not bool(weights["d2t"].any()):
        del weights["d2t"]
    else:
        weights["t2d"] = torch.zeros(c.vocab_size, dtype=torch.bool)
        weights["t2d"][head.draft_to_target.cpu()] = True
    if layout != "speculators":
        weights = {name.replace("layers.0.", "midlayer.", 1): tensor for name, tensor in weights.items()}
    if layout == "int8":
        weights = _as_int8(weights)
    if layout == "speculators" and c.attention_bias and not c.output_bias:
        # There `attention_bias` is of all four projections.
        weights["layers.0.self_attn.o_proj.bias"] = torch.zeros(c.hidden_size, dtype=head.dtype)
    described = _speculators_config(c, target) if layout == "speculators" else _sglang_config(c)
    dtype = str(head.dtype).removeprefix("torch.")
    if layout == "int8":
        dtype, described = "bfloat16", described | {"quantization_config": {"quant_method": "specdec-int8"}}
    # The weights last: a folder without them is not taken for a finished one.
    (folder / "config.json").write_text(json.dumps(described | {"torch_dtype": dtype}, indent=2) + "\n")
    partial = folder / "model.safetensors.part"
    save_file(weights, partial, metadata={"format": "pt"})
    partial.chmod((folder / "config.json").stat().st_mode)  # safetensors makes it the owner's alone
    partial.rename(folder / "model.safetensors")


def _refuse_others(folder: Path) -> None:
    """Heads are written over heads, not over a target."""
    try:
        config = _read_config(folder)
    except ValueError:  # none, or not written to its end
        config = {}
    if "draft_vocab_size" not in config and any(folder.glob("*.safetensors")):
        raise ValueError(f"{folder} holds the weights of another model, which would be lost: choose another folder")


def _as_int8(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices (rows, n) as int8, each beside its scales (rows, 1)."""
    out = dict(weights)
    for name, tensor in weights.items():
        if tensor.is_floating_point() and tensor.dim() == 2:
            scale = tensor.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
            out |= {name: (tensor.float() / scale).round().to(torch.int8), name + SCALE: scale}
    return out


def _of_int8(tensors: Mapping[str, Tensor], folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What `_as_int8` made, in bfloat16; and the scales."""
    out, scales = dict(tensors), {}
    for name, tensor in tensors.items():
        if tensor.dtype == torch.int8:
            if name + SCALE not in tensors:
                raise ValueError(f"{folder}: {name} is of int8, and its scales ({name + SCALE}) are not there")
            scale = scales[name + SCALE] = out.pop(name + SCALE)
            if tuple(scale.shape) != (tensor.shape[0], 1):
                raise ValueError(f"{folder}: {name + SCALE} has shape {tuple(scale.shape)}, not a scale for each row")
            out[name] = (tensor.float() * scale.float()).to(torch.bfloat16)
    return out, scales


def _layer_config(c: Eagle3Config) -> dict[str, Any]:
    described: dict[str, Any] = {
        "model_type": "qwen3" if c.qk_norm else "llama",
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "rms_norm_eps": c.rms_norm_eps,
        "hidden_act": c.hidden_act,
        "attention_bias": c.attention_bias,
        "mlp_bias": c.mlp_bias,
        "rope_parameters": dict(c.rope),
        "rope_theta": c.rope["rope_theta"],  # engines older than rope_parameters read these two
        "max_position_embeddings": c.max_position_embeddings,
        "vocab_size": c.vocab_size,
        "tie_word_embeddings": False,
    }
    scaling = {key: value for key, value in c.rope.items() if key != "rope_theta"}
    if scaling != {"rope_type": "default"}:
        described["rope_scaling"] = scaling
    if c.sliding_window is not None:
        described |= {"sliding_window": c.sliding_window, "use_sliding_window": True}
    return described


def _flags(c: Eagle3Config) -> dict[str, Any]:
    return {
        "norm_before_residual": c.norm_before_residual,
        "norm_before_fc": c.norm_before_fc,
        "fc_norm": c.fc_norm,
        "norm_output": c.norm_output,
    }


def _taps(c: Eagle3Config, convention: str) -> tuple[dict[str, Any], list[int] | None]:
    """Our field about counting layers, and the ids; those whose convention is not known stay as they are."""
    if c.tap_ids is None:
        return {}, None
    if not c.tap_convention_known:
        return {"tap_convention_assumed": c.tap_convention}, list(c.tap_ids)
    shift = {("entering", "output"): -1, ("output", "entering"): 1}.get((c.tap_convention, convention), 0)
    return {"tap_convention": convention}, [tap + shift for tap in c.tap_ids]


def _sglang_config(c: Eagle3Config) -> dict[str, Any]:
    said, taps = _taps(c, "output")
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_layer_config(c),
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": c.target_hidden_size,
        **_flags(c),
        **said,
        "eagle_config": {"use_aux_hidden_state": True}
        | ({} if taps is None else {"eagle_aux_hidden_state_layer_ids": taps}),
    }


def _speculators_config(c: Eagle3Config, target: str) -> dict[str, Any]:
    said, taps = _taps(c, "entering")
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
            ],
            "verifier": {"name_or_path": target, "architectures": []},
        },
        "transformer_layer_config": _layer_config(c),
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": c.target_hidden_size,
        **_flags(c),
        **said,
        **({} if taps is None else {"eagle_aux_hidden_state_layer_ids": taps}),
    }


def _folder(path: str | Path) -> Path:
    folder = Path(path)
    if folder.is_dir():
        return folder
    require_folder_or_id(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(str(path), allow_patterns=["*.json", "*.safetensors", "*.bin"]))
    except (HFValidationError, OSError) as error:
        raise ValueError(f"{path} is neither a folder nor a hub repository that can be reached: {error}") from error


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        trained = folder / "head"
        where = f": it is a training's, whose head is {trained}" if (trained / "config.json").exists() else ""
        raise ValueError(f"{folder} has no config.json{where}") from error
    except ValueError as error:
        raise ValueError(f"{folder}/config.json is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{folder}/config.json holds {type(config).__name__}, not an object")
    return config


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*model*.bin"))
    if not files:
        raise ValueError(f"{folder} holds no weights: neither *.safetensors nor pytorch_model*.bin")
    tensors: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in _read_file(file).items():
            if name in tensors:
                raise ValueError(f"{folder}: {name} is in more than one file")
            tensors[name] = tensor
    for index in folder.glob("*.index.json"):
        named = set(json.loads(index.read_text(encoding="utf-8")).get("weight_map", {}))
        if named - tensors.keys():
            raise ValueError(f"{folder}: {index.name} names {sorted(named - tensors.keys())[0]}, which no file holds")
    return tensors


def _read_file(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged or cut short: {error}") from error
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
        raise ValueError(
            f"{file} does not hold weights alone, or is damaged; nothing in it was executed: "
            f"{str(error).partition(chr(10))[0]}"
        ) from error
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise ValueError(f"{file} does not hold a dictionary of tensors")
    return loaded


def _check_vocabulary(folder: Path, d2t: Tensor | None, config: Eagle3Config) -> None:
    if d2t is None:
        raise ValueError(
            f"{folder} drafts {config.draft_vocab_size} of {config.vocab_size} tokens but has no d2t to say which"
        )
    if d2t.shape != (config.draft_vocab_size,):
        raise ValueError(f"{folder}: d2t has shape {tuple(d2t.shape)}, the draft vocabulary {config.draft_vocab_size}")
    ids = torch.arange(len(d2t)) + d2t.long()
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size or len(ids.unique()) < len(ids):
        raise ValueError(f"{folder}: d2t maps draft tokens outside the vocabulary or two to one")
