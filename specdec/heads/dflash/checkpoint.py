"""`BlockCheckpoint`: parsed checkpoint of a DFlash or DSpark drafter.

Layouts: z-lab's, DeepSpec's, transformers' own `speculation_type="dflash"` models, vLLM speculators' `dflash` and
`dspark`. `specdec.heads.loading` reads these and the other block drafters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specdec.heads.checkpoint import Understood, filled
from specdec.heads.dflash.config import DFlashConfig
from specdec.heads.dflash.head import DFlashHead


@dataclass(frozen=True)
class BlockCheckpoint(Understood):
    """Checkpoint of a DFlash or DSpark drafter."""

    config: DFlashConfig

    def head(self) -> DFlashHead:
        """Build the drafter on the CPU, in the precision it was saved in."""
        with torch.device("meta"):
            head = DFlashHead(self.config)
        return filled(head, self.weights, self.path)

    @property
    def borrowed(self) -> list[str]:
        return super().borrowed + ([] if self.config.own_head else ["lm_head.weight"])
