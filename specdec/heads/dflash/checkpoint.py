"""Checkpoints of block-parallel drafters: understanding whatever a folder holds, strictly.

Layouts: z-lab's, DeepSpec's, transformers' own `speculation_type="dflash"` models, vLLM speculators' `dflash` and
`dspark`. Medusa's stand in `medusa`, Hydra's in `hydra_checkpoint`; P-EAGLE heads are EAGLE heads to
`eagle3.checkpoint`, which also says how a checkpoint's facts are told apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specdec.heads.checkpoint import Understood, filled
from specdec.heads.dflash.config import DFlashConfig
from specdec.heads.dflash.head import DFlashHead


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
