"""Loading a block drafter (DFlash and its kin, Medusa, Hydra, P-EAGLE) from a checkpoint of any layout."""

from __future__ import annotations

from pathlib import Path

from specdec.heads import medusa
from specdec.heads.checkpoint import HeadCheckpoint
from specdec.heads.config_fields import read_head_config
from specdec.heads.dflash import checkpoint as dflash
from specdec.heads.dflash.head import DFlashHead
from specdec.heads.eagle3 import checkpoint as eagle3
from specdec.heads.eagle3.head import Eagle3Head
from specdec.heads.files import folder_of
from specdec.heads.hydra import checkpoint as hydra
from specdec.heads.hydra.head import HydraHeads
from specdec.heads.medusa import MedusaHeads
from specdec.models.loading import is_block


def load(path: str | Path) -> DFlashHead | Eagle3Head | MedusaHeads | HydraHeads:
    """Load a block drafter from a folder or from the hub.

    Args:
        path: a folder or hub id, in any supported layout.

    Returns:
        A `DFlashHead` for DFlash and its kin, an `Eagle3Head` for P-EAGLE, `MedusaHeads` or `HydraHeads`, on the CPU.

    Raises:
        ValueError: the checkpoint is missing, damaged or of an unknown layout.

    Example:
        ```python
        drafter = load("z-lab/Qwen3-4B-DFlash-b16")
        generator = SpeculativeGenerator(target, BlockProposer(drafter))
        ```
    """
    return read(path).head()


def read(path: str | Path) -> HeadCheckpoint[DFlashHead | Eagle3Head | MedusaHeads | HydraHeads]:
    """Read the checkpoint in a folder or on the hub (downloaded first). Checkpoints of EAGLE heads are read, too."""
    folder = folder_of(path)
    config = read_head_config(folder)
    if medusa.is_medusa(config):
        return medusa.read(folder)
    if hydra.is_hydra(config):
        return hydra.read(folder)
    return dflash.read(folder) if is_block(config) else eagle3.read(folder)
