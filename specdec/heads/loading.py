"""Loading a block drafter (DFlash, DSpark, Medusa, Hydra, P-EAGLE) from a checkpoint of any layout."""

from __future__ import annotations

from pathlib import Path

import torch

from specdec.heads import medusa
from specdec.heads.checkpoint import check_vocabulary, placed
from specdec.heads.config_fields import read_head_config
from specdec.heads.dflash.checkpoint import BlockCheckpoint
from specdec.heads.dflash.config_reader import BlockReader
from specdec.heads.dflash.head import DFlashHead
from specdec.heads.eagle3 import checkpoint as eagle3
from specdec.heads.eagle3.head import Eagle3Head
from specdec.heads.files import folder_of, read_tensors
from specdec.heads.hydra import checkpoint as hydra_checkpoint
from specdec.heads.hydra.checkpoint import HydraCheckpoint
from specdec.heads.hydra.head import HydraHeads
from specdec.heads.medusa import MedusaCheckpoint, MedusaHeads
from specdec.models.loading import is_block


def load(path: str | Path) -> DFlashHead | Eagle3Head | MedusaHeads | HydraHeads:
    """Load a block drafter from a folder or from the hub.

    Args:
        path: a folder or hub id, in any supported layout.

    Returns:
        A `DFlashHead` for DFlash and DSpark, an `Eagle3Head` for P-EAGLE, `MedusaHeads` or `HydraHeads`, on the CPU.

    Raises:
        ValueError: the checkpoint is missing, damaged or of an unknown layout.

    Example:
        ```python
        drafter = load("z-lab/Qwen3-4B-DFlash-b16")
        generator = SpeculativeGenerator(target, BlockProposer(drafter))
        ```
    """
    return read(path).head()


def read(path: str | Path) -> BlockCheckpoint | MedusaCheckpoint | HydraCheckpoint | eagle3.Checkpoint:
    """Read the checkpoint in a folder or on the hub (downloaded first). Checkpoints of EAGLE heads are read, too."""
    folder = folder_of(path)
    config = read_head_config(folder)
    if medusa.is_medusa(config):
        return medusa.read(folder)
    if hydra_checkpoint.is_hydra(config):
        return hydra_checkpoint.read(folder)
    if not is_block(config):
        return eagle3.read(folder)
    weights, used, ignored = placed(read_tensors(folder), folder)
    if "fc.weight" not in weights:
        raise ValueError(f"{folder} holds no fc.weight: it is not a drafter that reads the target's hidden states")
    reader = BlockReader(folder, config, weights, list(used))
    understood = reader.config()
    if understood.own_head:
        if understood.draft_vocab_size == understood.vocab_size:
            weights.setdefault("d2t", torch.zeros(understood.draft_vocab_size, dtype=torch.long))
        check_vocabulary(folder, weights.get("d2t"), understood)
    return BlockCheckpoint(folder, reader.format, understood, tuple(reader.fields), used, ignored, weights)
