"""Checkpoints of block-parallel drafters: understanding whatever a folder holds, strictly.

Layouts: z-lab's, DeepSpec's, transformers' own `speculation_type="dflash"` models, vLLM speculators' `dflash` and
`dspark`. Medusa's stand in `medusa`, Hydra's in `hydra_checkpoint`; P-EAGLE heads are EAGLE heads to
`eagle3.checkpoint`, which also says how a checkpoint's facts are told apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from specdec.blocks import hydra_checkpoint, medusa
from specdec.blocks.config import DFlashConfig
from specdec.blocks.head import DFlashHead
from specdec.blocks.hydra import HydraHeads
from specdec.blocks.hydra_checkpoint import HydraCheckpoint
from specdec.blocks.medusa import MedusaCheckpoint, MedusaHeads
from specdec.blocks.reading import BlockReader
from specdec.eagle3 import checkpoint as eagle3
from specdec.eagle3.checkpoint import Understood, check_vocabulary, filled, is_block, placed
from specdec.eagle3.fields import read_head_config
from specdec.eagle3.files import folder_of, read_tensors
from specdec.eagle3.head import Eagle3Head


@dataclass(frozen=True)
class BlockCheckpoint(Understood):
    """Of a DFlash or DSpark drafter."""

    config: DFlashConfig

    def head(self) -> DFlashHead:
        """The drafter, in the precision it was saved in."""
        with torch.device("meta"):
            head = DFlashHead(self.config)
        return filled(head, self.weights, self.path)

    @property
    def borrowed(self) -> list[str]:
        return super().borrowed + ([] if self.config.own_head else ["lm_head.weight"])


def load(path: str | Path) -> DFlashHead | Eagle3Head | MedusaHeads | HydraHeads:
    """A drafter from a folder or hub id, in any of the layouts; P-EAGLE's is an EAGLE-3 head."""
    return read(path).head()


def read(path: str | Path) -> BlockCheckpoint | MedusaCheckpoint | HydraCheckpoint | eagle3.Checkpoint:
    """Understand the checkpoint in a folder, or of a hub id (downloaded first); of an EAGLE head, too."""
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
        raise ValueError(f"{folder} holds no fc.weight: it is no drafter that reads a target's states")
    reader = BlockReader(folder, config, weights, list(used))
    understood = reader.config()
    if understood.own_head:
        if understood.draft_vocab_size == understood.vocab_size:
            weights.setdefault("d2t", torch.zeros(understood.draft_vocab_size, dtype=torch.long))
        check_vocabulary(folder, weights.get("d2t"), understood)
    return BlockCheckpoint(folder, reader.format, understood, tuple(reader.fields), used, ignored, weights)
