"""Which head belongs to which target: the heads of this project, and published ones by their hub ids.

Owns the names. Our own heads lie in `heads/` of a checkout, not in the wheel, and are known by their checksums; how one
gets here stands in `shipped`. Knows nothing of what is in a head, but by which proposer's name it drafts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.heads import shipped
from specdec.utils.download import Content, DownloadFailed, checksum

WEIGHTS = "model.safetensors"
Kind = Literal["eagle3", "dflash"]
IN_WORDS: dict[Kind, str] = {"eagle3": "EAGLE-3 head", "dflash": "drafter of blocks"}


@dataclass(frozen=True)
class Known:
    """target: its name on the hub, without its organization and in lower case. head: a folder of `heads/`, or a hub id.
    kind: the proposer's name that drafts with it: a DSpark drafter's is "dflash", too. files: of a folder; the hub
    checks its own. fingerprint: the target's, to know that one by if it goes by another name.
    """

    target: str
    head: str
    kind: Kind = "eagle3"
    files: Mapping[str, Content] = field(default_factory=dict)
    fingerprint: str | None = None


# Of several for a target, `"auto"` takes the first.
HEADS = (
    Known(
        "qwen2.5-coder-0.5b-instruct",
        "qwen2.5-coder-0.5b-instruct-2",
        files={
            "config.json": Content("3a3b805a2c7dbb2238d14f865afd880b47f9eb00d1733c57e63edf6882acb045", 1072),
            WEIGHTS: Content("3d3921fd10298707d8cc9b24dcb4856be3a1cc363239a4b3cb082d463a3b682c", 29_725_864),
        },
        fingerprint="24-896-151936-f8fa0ac93ef31395",
    ),
    Known(
        "qwen2.5-coder-1.5b-instruct",
        "qwen2.5-coder-1.5b-instruct-2",
        files={
            "config.json": Content("87d31d23135bb29225bbd1172d882142ab06f1b42afdc1f814ce06fe01ef8d3b", 1073),
            WEIGHTS: Content("99424d0aefed78e4d8fa11f2936a9c24e4af795065cb45837ced403ed6592abe", 32_184_744),
        },
        fingerprint="28-1536-151936-88c9fbbe2593e0cb",
    ),
    Known("llama-3.1-8b-instruct", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"),
    Known("llama-3.3-70b-instruct", "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B"),
    Known("qwen3-1.7b", "AngelSlim/Qwen3-1.7B_eagle3"),
    Known("qwen3-4b", "AngelSlim/Qwen3-4B_eagle3"),
    Known("qwen3-8b", "RedHatAI/Qwen3-8B-speculator.eagle3"),
    Known("qwen3-14b", "RedHatAI/Qwen3-14B-speculator.eagle3"),
    Known("qwen3-32b", "RedHatAI/Qwen3-32B-speculator.eagle3"),
    Known("qwen3-4b", "z-lab/Qwen3-4B-DFlash-b16", kind="dflash"),
    Known("qwen3-8b", "z-lab/Qwen3-8B-DFlash-b16", kind="dflash"),
)


class NoHead(ValueError):
    """No head is known for a target, or it is not there."""


def known(target: PreTrainedModel, kind: Kind | None = None) -> Known | None:
    """The first head for a target, of one kind or of any; going by the name that it was loaded under, or else by what
    it is."""
    name, wanted = name_of(target), [entry for entry in HEADS if kind in (None, entry.kind)]
    named = next((entry for entry in wanted if entry.target == name), None)
    if named is not None:
        return named
    mine = fingerprint(target)
    return next((entry for entry in wanted if entry.fingerprint is not None and entry.fingerprint == mine), None)


def fingerprint(target: PreTrainedModel) -> str | None:
    """Of a target's shape and the norm of its last state, which number formats and quantization leave as it is; None
    where that cannot be read."""
    weight = getattr(getattr(target.get_decoder(), "norm", None), "weight", None)
    text = target.config.get_text_config(decoder=True)
    shape = [getattr(text, name, None) for name in ("num_hidden_layers", "hidden_size", "vocab_size")]
    if not isinstance(weight, Tensor) or weight.device.type == "meta" or None in shape:
        return None
    content = hashlib.sha256(weight.detach().to("cpu", torch.bfloat16).float().numpy().tobytes())
    return "-".join(map(str, [*shape, content.hexdigest()[:16]]))


def find(target: PreTrainedModel, kind: Kind, patience: float | None = None) -> str:
    """The folder or hub id of a target's head. Ours lies in this checkout, in `$SPECDEC_HEADS` or in the cache
    ($SPECDEC_CACHE/heads); else it is downloaded.

    Args:
        patience: seconds that a download may take; None: as long as bytes come.

    Raises:
        NoHead: none is known, ours is not here and cannot be downloaded, or its file is damaged.
    """
    entry = known(target, kind)
    if entry is None:
        raise NoHead(
            f"no {IN_WORDS[kind]} is known for {name_of(target) or type(target).__name__}: give one as "
            f'"{kind}:PATH_OR_HUB_ID", or train one with `specdec train`'
        )
    return str(_folder(entry, patience)) if entry.files else entry.head


def at_hand(name: str, kind: Kind, download: bool = False) -> bool:
    """Whether one of our own heads for a target of this name is on this machine.

    Args:
        download: it may come here for that.
    """
    for entry in HEADS:
        if entry.files and entry.target == name.lower() and entry.kind == kind:
            with suppress(NoHead):
                return bool(_folder(entry) if download else shipped.folder_of(entry.head, WEIGHTS))
    return False


def _folder(entry: Known, patience: float | None = None) -> Path:
    """Where one of our own heads is, whole."""
    folder = shipped.folder_of(entry.head, WEIGHTS)
    try:
        folder = folder or shipped.bring(entry.head, entry.files, patience)
    except DownloadFailed as error:
        raise NoHead(
            f"the head {entry.head} is not on this machine: {error}. Copy {' and '.join(entry.files)} from "
            f"heads/{entry.head} of specdec's repository into {shipped.head_folders()[-1] / entry.head}, or set "
            f"{shipped.SOURCE} to a folder or an address that has {entry.head}/{WEIGHTS}"
        ) from error
    for name, content in entry.files.items():
        if not (folder / name).exists() or checksum(folder / name) != content.sha256:
            raise NoHead(
                f"{folder / name} is not the file that it should be (its checksum differs): remove {folder}, and fetch "
                "the head again"
            )
    return folder


def name_of(target: PreTrainedModel) -> str:
    """`Qwen/Qwen2.5-Coder-0.5B-Instruct` and a folder of that name give the same."""
    return Path(str(getattr(target.config, "_name_or_path", "") or "").rstrip("/")).name.lower()
