"""The tensors of MTP layers in a target's checkpoint: which there are, and what each is for, in all known layouts.

Owns their names. Nothing but these tensors is read, and nothing is executed.

    layers.61.enorm, .hnorm, .eh_proj, .shared_head.norm, and a decoder layer's own     behind the target's last layer
        DeepSeek-V3 and V3.2, GLM-4.5 to 4.7, Step 3.5
    mtp.fc, mtp.pre_fc_norm_embedding, mtp.pre_fc_norm_hidden, mtp.norm, mtp.layers.0   one fusing layer for all
        Qwen3-Next, Qwen3.5, EXAONE-MoE, Mellum
    mtp.layers.0.eh_proj, ..., mtp.layers.1.final_layernorm                             a block of several layers
        Nemotron-H
    model.mtp.layers.0.eh_proj, ..., .final_layernorm                                   several, one behind the other
        MiMo-V2-Flash
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub.errors import HFValidationError
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.utils import cached_file

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
OUTER = r"^(?:model\.|language_model\.|llm\.|backbone\.)*"
OWN = re.compile(OUTER + r"mtp(?:_layers)?\.(?:(?:layers\.)?(\d+)\.)?(.+)$")
BEHIND = re.compile(OUTER + r"layers\.(\d+)\.(.+)$")
INNER = re.compile(r"^(?:transformer_block|mtp_block|transformer)\.")
EMBED_NORM, STATE_NORM, FUSE, NORM = "embed_norm.weight", "state_norm.weight", "fuse.weight", "norm.weight"
ROLES = {
    **dict.fromkeys(("enorm.weight", "pre_fc_norm_embedding.weight", "token_layernorm.weight"), EMBED_NORM),
    **dict.fromkeys(("hnorm.weight", "pre_fc_norm_hidden.weight", "hidden_layernorm.weight"), STATE_NORM),
    **dict.fromkeys(("eh_proj.weight", "fc.weight", "input_proj.weight"), FUSE),
    **dict.fromkeys(("shared_head.norm.weight", "final_layernorm.weight", "post_norm.weight"), NORM),
}
STATES_FIRST = "input_proj.weight"  # what fuses in the layouts that put the state before the embedding
TARGETS_OWN = ("shared_head.head.", "shared_head.output.", "embed_tokens.", "lm_head.")
RENAMED = {"pre_mlp_layernorm.": "post_attention_layernorm."}  # MiMo's name for it


class NoMtpLayers(ValueError):
    """A checkpoint holds none, or is not there."""


@dataclass
class MtpTensors:
    """Of one MTP layer.

    Attributes:
        own: by `EMBED_NORM`, `STATE_NORM`, `FUSE` and `NORM`. block: of its decoder layers, in order, by the names
            they have within a layer. states_first: the state goes before the embedding into what fuses them.
    """

    own: dict[str, Tensor] = field(default_factory=dict)
    block: list[dict[str, Tensor]] = field(default_factory=list)
    states_first: bool = False


def names(path: str, target_layers: int, *, local: bool = False) -> dict[str, str]:
    """The MTP tensors of a checkpoint, with the file that holds each; empty where there are none.

    Args:
        path: folder or hub id. target_layers: how many decoder layers the target has. local: only look at what is on
            this machine.

    Raises:
        NoMtpLayers: there is no checkpoint in safetensors files.
    """
    index = _file(path, INDEX, local)
    if index is not None:
        held = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
    else:
        single = _file(path, SINGLE, local)
        if single is None:
            raise NoMtpLayers(
                f"{path} is not a folder or hub id with {SINGLE} or {INDEX}"
                if path
                else 'the target comes from no folder or hub id that could hold MTP layers: name one, "mtp:PATH_OR_ID"'
            )
        with safe_open(single, framework="pt") as opened:
            held = dict.fromkeys(opened.keys(), SINGLE)
    return {name: file for name, file in held.items() if _place(name, target_layers) is not None}


def read(path: str, target_layers: int) -> list[MtpTensors]:
    """All MTP layers of a checkpoint, in order; see `names`.

    Raises:
        NoMtpLayers: there are none.
    """
    held = names(path, target_layers)
    if not held:
        raise NoMtpLayers(f"{path} holds no MTP layers (tensors behind layer {target_layers - 1}, or mtp.*)")
    layers: list[MtpTensors] = []
    shared = MtpTensors()  # what is there once for all
    blocks: dict[int, dict[str, Tensor]] = {}
    begins: dict[int, MtpTensors] = {}  # layers, by the first decoder layer of their block
    ends: dict[int, Tensor] = {}
    for name, tensor in _tensors(path, held):
        place = _place(name, target_layers)
        assert place is not None
        index, rest = place
        if rest.startswith(TARGETS_OWN):
            continue
        role = ROLES.get(rest, NORM if index is None and rest == "norm.weight" else None)
        if role is None:
            if index is None:
                raise ValueError(f"{path}: {name} is in none of the known layouts of MTP layers")
            blocks.setdefault(index, {})[_renamed(rest)] = tensor
        elif index is None or role != NORM:
            layer = shared if index is None else begins.setdefault(index, MtpTensors())
            layer.own[role] = tensor
            layer.states_first |= rest == STATES_FIRST
        else:
            ends[index] = tensor
    firsts = sorted(begins) or sorted(blocks)
    for first, behind in zip(firsts, [*firsts[1:], max(blocks, default=0) + 1], strict=True):
        layer = begins.get(first, MtpTensors())
        layer.own = shared.own | layer.own
        layer.states_first |= shared.states_first
        for index in range(first, behind):
            layer.block.append(blocks.get(index, {}))
            if index in ends:
                layer.own[NORM] = ends[index]
        missing = [role for role in (EMBED_NORM, STATE_NORM, FUSE, NORM) if role not in layer.own]
        if missing or not all(layer.block):
            raise ValueError(f"{path}: MTP layer {len(layers)} lacks {missing or 'tensors of its decoder layers'}")
        layers.append(layer)
    return layers


def write(layers: Sequence[MtpTensors], folder: Path) -> None:
    """Write MTP layers alone, in Nemotron-H's layout: model.safetensors, which `read` takes for any target.

    Raises:
        ValueError: the folder holds another model's weights.
    """
    if (folder / "config.json").exists():  # which layers alone have not
        raise ValueError(f"{folder} holds another model, which would be lost: choose another folder")
    tensors: dict[str, Tensor] = {}
    index = 0
    for layer in layers:
        first, last = f"mtp.layers.{index}.", f"mtp.layers.{index + len(layer.block) - 1}."
        fuse = STATES_FIRST if layer.states_first else "eh_proj.weight"
        names = {EMBED_NORM: "enorm.weight", STATE_NORM: "hnorm.weight", FUSE: fuse}
        tensors |= {first + name: layer.own[role] for role, name in names.items()}
        tensors[f"{last}final_layernorm.weight"] = layer.own[NORM]
        for block in layer.block:
            tensors |= {f"mtp.layers.{index}.{name}": tensor for name, tensor in block.items()}
            index += 1
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{SINGLE}.part"
    save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, partial, {"format": "pt"})
    partial.replace(folder / SINGLE)


def _place(name: str, target_layers: int) -> tuple[int | None, str] | None:
    """Which MTP layer a tensor is of (None: of all) and its name there; None if it is the target's own."""
    own = OWN.match(name)
    if own:
        index, rest = own.groups()
        return (None if index is None else int(index)), INNER.sub("", rest)
    behind = BEHIND.match(name)
    if behind and int(behind[1]) >= target_layers:
        return int(behind[1]) - target_layers, INNER.sub("", behind[2])
    return None


def _renamed(rest: str) -> str:
    for theirs, usual in RENAMED.items():
        rest = rest.replace(theirs, usual)
    return rest


def _file(path: str, name: str, local: bool = False) -> str | None:
    """Where a file of the checkpoint is, fetched from the hub if it is not here yet; None: it has none."""
    if not path:
        return None
    try:
        found = cached_file(
            path,
            name,
            local_files_only=local,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    except (OSError, HFValidationError):
        return None
    return found


def _tensors(path: str, held: dict[str, str]) -> Iterator[tuple[str, Tensor]]:
    """The named tensors, file by file."""
    with ExitStack() as stack:
        for file in sorted(set(held.values())):
            place = _file(path, file)
            if place is None:
                raise NoMtpLayers(f"{path}: {file}, which should hold MTP layers, cannot be had")
            opened = stack.enter_context(safe_open(place, framework="pt"))
            for name in sorted(name for name, where in held.items() if where == file):
                yield name, opened.get_tensor(name)
