"""Files of a head's checkpoint: reading config.json and the tensors under their stored names.

Nothing in a file is executed.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from specdec.utils.parsing import parsed
from specdec.utils.paths import require_folder_or_id

log = logging.getLogger(__name__)
READ = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.int32, torch.int64, torch.bool)
WANTED = ["*.json", "*.safetensors", "*.bin", "medusa*.pt", "hydra*.pt"]  # files to download from a hub repository


def folder_of(path: str | Path) -> Path:
    """Return the local folder of a checkpoint, downloading it if `path` is a hub id."""
    folder = Path(path)
    if folder.is_dir():
        return folder
    require_folder_or_id(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    log.info("Downloading %s from the hub if it is not cached yet", path)
    try:
        return Path(snapshot_download(str(path), allow_patterns=WANTED))
    except (HFValidationError, OSError) as error:
        raise ValueError(f"{path} is neither a folder nor a reachable hub repository: {error}") from error


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json. Raises ValueError if it is missing or not a JSON object."""
    try:
        config = parsed((folder / "config.json").read_bytes(), f"{folder}/config.json")
    except FileNotFoundError as error:
        trained = folder / "head"
        where = f": it is a training run, use its head in {trained}" if (trained / "config.json").exists() else ""
        raise ValueError(f"{folder} has no config.json{where}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{folder}/config.json holds {type(config).__name__}, expected an object")
    return config


def read_tensors(folder: Path, others: str = "*model*.bin") -> dict[str, Tensor]:
    """Read all tensors of a folder. others: pattern of files to read if there are no safetensors."""
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob(others))
    if not files:
        raise ValueError(f"{folder} holds no weights: neither *.safetensors nor {others}")
    tensors: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in _read_file(file).items():
            if name in tensors:
                raise ValueError(f"{folder}: {name} is in more than one file")
            _check(tensor, f"{folder}: {name}")
            tensors[name] = tensor
    for index in folder.glob("*.index.json"):
        described = parsed(index.read_bytes(), str(index))
        weight_map = described.get("weight_map", {}) if isinstance(described, dict) else None
        if not isinstance(weight_map, dict):
            raise ValueError(f"{index} is not a weight index: expected an object with a weight_map")
        named = weight_map.keys()
        if named - tensors.keys():
            raise ValueError(
                f"{folder}: {index.name} names {sorted(named - tensors.keys())[0]}, which no file contains"
            )
    return tensors


def _check(tensor: Tensor, named: str) -> None:
    """Raise ValueError for a dtype that heads are not stored in, and for values that are not finite."""
    if tensor.dtype not in READ:
        raise ValueError(f"{named} has dtype {tensor.dtype}, which is not supported: save it in bfloat16 or float32")
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        raise ValueError(f"{named} holds NaN or infinite values: the file is damaged, or the training diverged")


def _read_file(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged or truncated: {error}") from error
    except Exception as error:  # torch's unpickler raises many types on bytes that are not a pickle
        raise ValueError(
            f"{file} is damaged or contains more than weights; nothing in it was executed: "
            f"{str(error).partition(chr(10))[0]}"
        ) from error
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise ValueError(f"{file} does not hold a dictionary of tensors")
    return loaded
