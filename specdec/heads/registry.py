"""`HEADS`: registry of the head for each target, shipped by this project or published on the hub.

Shipped heads are in `heads/` of a checkout but not in the wheel. `shipped` downloads them; checksums verify them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from specdec.heads import shipped
from specdec.utils.download import Content, DownloadFailed, checksum

WEIGHTS = "model.safetensors"
Kind = Literal["eagle3", "dflash"]
KIND_NAMES: dict[Kind, str] = {"eagle3": "EAGLE-3 head", "dflash": "block drafter"}
NORM = "model.norm.weight"  # final norm of a checkpoint
# Parts of a name that do not change which head fits: former organization, quantization.
VARIANT = re.compile(r"^meta-(?=llama)|(-unsloth)?-(bnb-\dbit|fp8(-dynamic)?|awq|gptq(-int\d)?|quantized\.w\w+|gguf)$")
SNAPSHOT = re.compile(r".*models--.*--(.+)/snapshots/[^/]+/?")  # folder of a model in the hub's cache


@dataclass(frozen=True)
class Known:
    """Registry entry.

    Attributes:
        target: the target's name on the hub, in lower case and without its organization.
        head: a folder in `heads/`, or a hub id.
        kind: name of the proposer that drafts with it: "dflash" for DSpark, JetSpec, Domino and DFlash 2, too.
        layout: layout of its checkpoint, by the project that defined it.
        files: files of a shipped head, with checksums. Empty for a hub id.
        fingerprint: fingerprint of the target, which identifies it under any other name.
    """

    target: str
    head: str
    kind: Kind = "eagle3"
    layout: str = "specdec"
    files: Mapping[str, Content] = field(default_factory=dict)
    fingerprint: str | None = None


# If a target has several heads, `"auto"` uses the first.
HEADS = (
    Known(
        "qwen2.5-coder-0.5b-instruct",
        "qwen2.5-coder-0.5b-instruct-2",
        files={
            "config.json": Content("f93ed54dbc1c2661ef880c52752f93414a40734a2159618a6287f80834bb3f07", 1096),
            WEIGHTS: Content("3d3921fd10298707d8cc9b24dcb4856be3a1cc363239a4b3cb082d463a3b682c", 29_725_864),
        },
        fingerprint="24-896-151936-f8fa0ac93ef31395",
    ),
    Known(
        "qwen2.5-coder-1.5b-instruct",
        "qwen2.5-coder-1.5b-instruct-2",
        files={
            "config.json": Content("bade618e53a41e3e3b480daabfa65b13026a3fcb5fa594fe718a92c5cfe564b1", 1097),
            WEIGHTS: Content("99424d0aefed78e4d8fa11f2936a9c24e4af795065cb45837ced403ed6592abe", 32_184_744),
        },
        fingerprint="28-1536-151936-88c9fbbe2593e0cb",
    ),
    Known("llama-3.1-8b-instruct", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", layout="SafeAILab"),
    Known("llama-3.1-8b-instruct", "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3", layout="speculators"),
    Known("llama-3.3-70b-instruct", "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B", layout="SafeAILab"),
    Known("qwen3-1.7b", "AngelSlim/Qwen3-1.7B_eagle3", layout="SGLang"),
    Known("qwen3-4b", "AngelSlim/Qwen3-4B_eagle3", layout="SGLang"),
    Known("qwen3-4b", "z-lab/Qwen3-4B-DFlash-b16", "dflash", "z-lab"),
    Known("qwen3-4b", "deepseek-ai/dspark_qwen3_4b_block7", "dflash", "DeepSpec"),
    Known("qwen3-4b", "Huang2020/Qwen3-4B-Domino-b16", "dflash", "z-lab"),
    Known("qwen3-8b", "RedHatAI/Qwen3-8B-speculator.eagle3", layout="speculators"),
    Known("qwen3-8b", "z-lab/Qwen3-8B-DFlash-b16", "dflash", "z-lab"),
    Known("qwen3-8b", "deepseek-ai/dspark_qwen3_8b_block7", "dflash", "DeepSpec"),
    Known("qwen3-8b", "JetSpec/jetspec-qwen3-8b", "dflash", "z-lab"),
    Known("qwen3-8b", "Huang2020/Qwen3-8B-Domino-b16", "dflash", "z-lab"),
    Known("qwen3-14b", "RedHatAI/Qwen3-14B-speculator.eagle3", layout="speculators"),
    Known("qwen3-14b", "deepseek-ai/dspark_qwen3_14b_block7", "dflash", "DeepSpec"),
    Known("qwen3-30b-a3b", "JetSpec/jetspec-qwen3-30b-a3b", "dflash", "z-lab"),
    Known("qwen3-32b", "RedHatAI/Qwen3-32B-speculator.eagle3", layout="speculators"),
    Known("qwen3.8-27b", "z-lab/Qwen3.8-27B-DFlash2", "dflash", "z-lab"),
    Known("gemma-4-31b-it", "RedHatAI/gemma-4-31B-it-speculator.eagle3", layout="speculators"),
    Known("gpt-oss-20b", "RedHatAI/gpt-oss-20b-speculator.eagle3", layout="speculators"),
)


class NoHead(ValueError):
    """No head is known for a target, or it is not available on this machine."""


def known(target: PreTrainedModel, kind: Kind | None = None) -> Known | None:
    """Return the first entry for a target, by the name it was loaded under, else by its fingerprint.

    kind: consider only heads of this kind. None considers all.
    """
    name, wanted = name_of(target), [entry for entry in HEADS if kind in (None, entry.kind)]
    mine = None if any(entry.target == name for entry in wanted) else fingerprint(target)
    return next((entry for entry in wanted if _fits(entry, name, mine)), None)


def known_for(target: str) -> Sequence[Known]:
    """Return the entries for a target that is not loaded, by the name of its folder or hub id, else by its weights.

    target: path or hub id.
    """
    name = named(target)
    mine = None if any(entry.target == name for entry in HEADS) else _fingerprint_in(Path(target))
    return [entry for entry in HEADS if _fits(entry, name, mine)]


def where(entry: Known) -> Path | None:
    """Return the folder of a head on this machine, or None. Nothing is downloaded."""
    if entry.files:
        return shipped.folder_of(entry.head, WEIGHTS)
    config = try_to_load_from_cache(entry.head, "config.json")
    return Path(config).parent if isinstance(config, str) else None


def _fits(entry: Known, name: str, mine: str | None) -> bool:
    return entry.target == name or (mine is not None and entry.fingerprint == mine)


def fingerprint(target: PreTrainedModel) -> str | None:
    """Return the target's shape and a hash of its final norm's weight, or None if they cannot be read.

    The norm's weight does not depend on the number format or quantization.
    """
    return _fingerprint(target.config, getattr(getattr(target.get_decoder(), "norm", None), "weight", None))


def _fingerprint_in(folder: Path) -> str | None:
    """Return the fingerprint of the model in a folder, from its config and one tensor."""
    with suppress(OSError, ValueError):
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt") as tensors:
                if NORM in tensors.keys():  # noqa: SIM118
                    return _fingerprint(AutoConfig.from_pretrained(folder), tensors.get_tensor(NORM))
    return None


def _fingerprint(config: PretrainedConfig, norm: object) -> str | None:
    text = config.get_text_config(decoder=True)
    shape = [getattr(text, name, None) for name in ("num_hidden_layers", "hidden_size", "vocab_size")]
    if not isinstance(norm, Tensor) or norm.device.type == "meta" or None in shape:
        return None
    content = hashlib.sha256(norm.detach().to("cpu", torch.bfloat16).float().numpy().tobytes())
    return "-".join(map(str, [*shape, content.hexdigest()[:16]]))


def find(target: PreTrainedModel, kind: Kind, patience: float | None = None) -> str:
    """Return the folder or hub id of a target's head.

    A shipped head is searched in this checkout, in `$SPECDEC_HEADS` and in the cache (`$SPECDEC_CACHE/heads`). If none
    has it, it is downloaded.

    patience: time limit of a download in seconds. None waits as long as bytes arrive.

    Raises:
        NoHead: no head is known, it cannot be downloaded, or its file is damaged.
    """
    entry = known(target, kind)
    if entry is None:
        raise NoHead(
            f"no {KIND_NAMES[kind]} is known for {name_of(target) or type(target).__name__}: give one as "
            f'"{kind}:PATH_OR_HUB_ID", or train one with `specdec train`'
        )
    return str(_folder(entry, patience)) if entry.files else entry.head


def at_hand(name: str, kind: Kind, download: bool = False) -> bool:
    """Return whether a shipped head for a target of this name is on this machine. download: download it if not."""
    for entry in HEADS:
        if entry.files and entry.target == name.lower() and entry.kind == kind:
            with suppress(NoHead):
                return bool(_folder(entry) if download else shipped.folder_of(entry.head, WEIGHTS))
    return False


def _folder(entry: Known, patience: float | None = None) -> Path:
    """Return the folder of a shipped head, downloaded if necessary and verified."""
    folder = shipped.folder_of(entry.head, WEIGHTS)
    try:
        folder = folder or shipped.download_head(entry.head, entry.files, patience)
    except DownloadFailed as error:
        raise NoHead(
            f"the head {entry.head} is not on this machine: {error}. Copy {' and '.join(entry.files)} from "
            f"heads/{entry.head} of specdec's repository into {shipped.head_folders()[-1] / entry.head}, or set "
            f"{shipped.SOURCE} to a folder or URL that has {entry.head}/{WEIGHTS}"
        ) from error
    for name, content in entry.files.items():
        if not (folder / name).exists() or checksum(folder / name) != content.sha256:
            raise NoHead(
                f"{folder / name} is not the expected file (its checksum differs): remove {folder} and download the "
                "head again"
            )
    return folder


def name_of(target: PreTrainedModel) -> str:
    """Return the last part of the hub id or folder that the target was loaded from, as `Known.target` has it."""
    return named(str(getattr(target.config, "_name_or_path", "") or ""))


def named(path: str) -> str:
    """Return the name of a model at a path or hub id: its last part in lower case, without a quantization.

    Examples:
        >>> [named(path) for path in ("Qwen/Qwen3-8B-FP8", "/hub/models--Qwen--Qwen3-8B/snapshots/b968/")]
        ['qwen3-8b', 'qwen3-8b']
    """
    snapshot = SNAPSHOT.fullmatch(path)
    return VARIANT.sub("", (snapshot[1] if snapshot else Path(path.rstrip("/")).name).lower())
