"""Drafters that draft a block of tokens in one pass over the target's states: DFlash and DSpark.

The module, its checkpoints, and how it runs beside a target. Knows nothing of how drafts are made of its logits.
"""

from specdec.blocks.checkpoint import load
from specdec.blocks.config import DFlashConfig
from specdec.blocks.head import DFlashHead

__all__ = ["DFlashConfig", "DFlashHead", "load"]
