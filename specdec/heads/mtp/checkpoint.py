"""`read`: finds and reads the tensors of MTP layers in a target's checkpoint, in all known layouts.

Only these tensors are read, and nothing is executed.

    layers.61.enorm, .hnorm, .eh_proj, .shared_head.norm, and a decoder layer's own     after the target's last layer
        DeepSeek-V3 and V3.2, GLM-4.5 to 4.7, Step 3.5
    mtp.fc, mtp.pre_fc_norm_embedding, mtp.pre_fc_norm_hidden, mtp.norm, mtp.layers.0   one fusing layer for all
        Qwen3-Next, Qwen3.5, EXAONE-MoE, Mellum
    mtp.layers.0.eh_proj, ..., mtp.layers.1.final_layernorm                             a block of several layers
        Nemotron-H
    model.mtp.layers.0.eh_proj, ..., .final_layernorm                                   several MTP layers in sequence
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
EXTRA_LAYER = re.compile(OUTER + r"layers\.(\d+)\.(.+)$")
INNER = re.compile(r"^(?:transformer_block|mtp_block|transformer)\.")
EMBED_NORM, STATE_NORM, FUSE, NORM = "embed_norm.weight", "state_norm.weight", "fuse.weight", "norm.weight"
ROLES = {
    **dict.fromkeys(("enorm.weight", "pre_fc_norm_embedding.weight", "token_layernorm.weight"), EMBED_NORM),
    **dict.fromkeys(("hnorm.weight", "pre_fc_norm_hidden.weight", "hidden_layernorm.weight"), STATE_NORM),
    **dict.fromkeys(("eh_proj.weight", "fc.weight", "input_proj.weight"), FUSE),
    **dict.fromkeys(("shared_head.norm.weight", "final_layernorm.weight", "post_norm.weight"), NORM),
}
STATES_FIRST = "input_proj.weight"  # fusing matrix in the layouts that put the state before the embedding
TARGETS_OWN = ("shared_head.head.", "shared_head.output.", "embed_tokens.", "lm_head.")


class NoMtpLayers(ValueError):
    """The checkpoint does not exist or holds no MTP layers."""


@dataclass
class MtpTensors:
    """Tensors of one MTP layer.

    Attributes:
        own: its norms and fusing matrix, by `EMBED_NORM`, `STATE_NORM`, `FUSE` and `NORM`.
        block: tensors of its decoder layers, in order, by their names within a layer.
        states_first: whether the fusing matrix reads the state before the embedding.
    """

    own: dict[str, Tensor] = field(default_factory=dict)
    block: list[dict[str, Tensor]] = field(default_factory=list)
    states_first: bool = False


def names(path: str, target_layers: int, *, local: bool = False) -> dict[str, str]:
    """List the MTP tensors of a checkpoint.

    Args:
        path: folder or hub id.
        target_layers: number of decoder layers of the target.
        local: do not download anything.

    Returns:
        The file that holds each tensor, by name. Empty if the checkpoint has no MTP layers.

    Raises:
        NoMtpLayers: there is no checkpoint in safetensors files.
    """
    index = _file(path, INDEX, local)
    if index is not None:
        files = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
    else:
        single = _file(path, SINGLE, local)
        if single is None:
            raise NoMtpLayers(
                f"{path} is not a folder or hub id with {SINGLE} or {INDEX}"
                if path
                else 'the target was not loaded from a folder or hub id with MTP layers: give one as "mtp:PATH_OR_ID"'
            )
        with safe_open(single, framework="pt") as opened:
            files = dict.fromkeys(opened.keys(), SINGLE)
    return {name: file for name, file in files.items() if _place(name, target_layers) is not None}


def read(path: str, target_layers: int) -> list[MtpTensors]:
    """Read all MTP layers of a checkpoint, in order. Arguments as for `names`.

    Raises:
        NoMtpLayers: the checkpoint has none.
        ValueError: a tensor is missing or in no known layout.
    """
    files = names(path, target_layers)
    if not files:
        raise NoMtpLayers(f"{path} holds no MTP layers (tensors after layer {target_layers - 1}, or mtp.*)")
    layers: list[MtpTensors] = []
    shared = MtpTensors()  # tensors that all layers share
    blocks: dict[int, dict[str, Tensor]] = {}
    begins: dict[int, MtpTensors] = {}  # layers, by the first decoder layer of their block
    ends: dict[int, Tensor] = {}
    for name, tensor in _tensors(path, files):
        place = _place(name, target_layers)
        assert place is not None
        index, rest = place
        if rest.startswith(TARGETS_OWN):
            continue
        role = ROLES.get(rest, NORM if index is None and rest == "norm.weight" else None)
        if role is None:
            if index is None:
                raise ValueError(f"{path}: {name} belongs to no known layout of MTP layers")
            rest = rest.replace("pre_mlp_layernorm.", "post_attention_layernorm.")  # MiMo's name for it
            blocks.setdefault(index, {})[rest] = tensor
        elif index is None or role != NORM:
            layer = shared if index is None else begins.setdefault(index, MtpTensors())
            layer.own[role] = tensor
            layer.states_first |= rest == STATES_FIRST
        else:
            ends[index] = tensor
    firsts = sorted(begins) or sorted(blocks)
    for first, end in zip(firsts, [*firsts[1:], max(blocks, default=0) + 1], strict=True):
        layer = begins.get(first, MtpTensors())
        layer.own = shared.own | layer.own
        layer.states_first |= shared.states_first
        for index in range(first, end):
            layer.block.append(blocks.get(index, {}))
            if index in ends:
                layer.own[NORM] = ends[index]
        missing = [role for role in (EMBED_NORM, STATE_NORM, FUSE, NORM) if role not in layer.own]
        if missing or not all(layer.block):
            raise ValueError(f"{path}: MTP layer {len(layers)} lacks {missing or 'tensors of its decoder layers'}")
        layers.append(layer)
    return layers


def write(layers: Sequence[MtpTensors], folder: Path) -> None:
    """Write MTP layers without their target to model.safetensors, in Nemotron-H's layout.

    `read` accepts this layout for any target.

    Raises:
        ValueError: the folder holds another model.
    """
    if (folder / "config.json").exists():  # MTP layers without a target have no config
        raise ValueError(f"{folder} holds another model, which would be overwritten: choose another folder")
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
    """Return a tensor's MTP layer (None if all share it) and its name within it, or None for a target's tensor."""
    own = OWN.match(name)
    if own:
        index, rest = own.groups()
        return (None if index is None else int(index)), INNER.sub("", rest)
    extra = EXTRA_LAYER.match(name)
    if extra and int(extra[1]) >= target_layers:
        return int(extra[1]) - target_layers, INNER.sub("", extra[2])
    return None


def _file(path: str, name: str, local: bool = False) -> str | None:
    """Return the local path of a checkpoint's file, downloaded from the hub if necessary, or None if it has none."""
    if not path:
        return None
    try:
        return cached_file(
            path,
            name,
            local_files_only=local,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    except (OSError, HFValidationError):
        return None


def _tensors(path: str, files: dict[str, str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the listed tensors with their names, file by file."""
    with ExitStack() as stack:
        for file in sorted(set(files.values())):
            place = _file(path, file)
            if place is None:
                raise NoMtpLayers(f"{path}: {file}, which holds MTP layers, is missing and cannot be downloaded")
            opened = stack.enter_context(safe_open(place, framework="pt"))
            for name in sorted(name for name, where in files.items() if where == file):
                yield name, opened.get_tensor(name)
