"""`load` and `read`: strict loading of EAGLE heads from checkpoints of all common layouts.

Layouts: SafeAILab EAGLE-1 to 3, SpecForge and SGLang, vLLM speculators, ModelOpt, and specdec's own. `config_reader`
infers the config, `export` writes heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from specdec.heads.checkpoint import Understood, check_vocabulary, filled, placed
from specdec.heads.config_fields import read_head_config
from specdec.heads.eagle3.config import Eagle3Config
from specdec.heads.eagle3.config_reader import ConfigReader
from specdec.heads.eagle3.head import Eagle3Head
from specdec.heads.files import folder_of, read_tensors
from specdec.heads.int8_weights import of_int8
from specdec.models.loading import is_block


@dataclass(frozen=True)
class Checkpoint(Understood):
    """Checkpoint of an EAGLE head."""

    config: Eagle3Config

    def head(self) -> Eagle3Head:
        """Build the head on the CPU, in the precision it was saved in, or in bfloat16 if that was int8."""
        with torch.device("meta"):
            head = Eagle3Head(self.config)
        return filled(head, self.weights, self.path)

    @property
    def borrowed(self) -> list[str]:
        return super().borrowed + (["lm_head.weight"] if self.config.version == 1 else [])


def load(path: str | Path) -> Eagle3Head:
    """Load an EAGLE head from a folder or from the hub. Nothing in its files is executed.

    Args:
        path: a folder or hub id, in any supported layout.

    Returns:
        The head, on the CPU, in the precision it was saved in (bfloat16 if that was int8).

    Raises:
        ValueError: the checkpoint is missing or damaged, a tensor is unexpected, or it is not an EAGLE head.

    Example:
        ```python
        head = load("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B")
        generator = SpeculativeGenerator(target, Eagle3Proposer(head))
        ```
    """
    return read(path).head()


def read(path: str | Path) -> Checkpoint:
    """Read the checkpoint in a folder or on the hub (downloaded first). Arguments and errors as for `load`."""
    folder = folder_of(path)
    config = read_head_config(folder)
    if is_block(config):
        raise ValueError(f'{folder} is a block drafter, not an EAGLE head: pass "dflash:{path}" as the proposer')
    stored = read_tensors(folder)
    tensors, scales = of_int8(stored, folder)
    weights, used, ignored = placed(tensors, folder)
    used = {name: tuple(scale.shape) for name, scale in scales.items()} | used
    if "fc.weight" not in weights:
        raise ValueError(f"{folder} holds no fc.weight: it is not an EAGLE head")
    reader = ConfigReader(folder, config, weights, list(used))
    understood = reader.config()
    if understood.draft_vocab_size == understood.vocab_size or understood.version == 1:
        weights.setdefault("d2t", torch.zeros(understood.draft_vocab_size, dtype=torch.long))
    check_vocabulary(folder, weights.get("d2t"), understood)
    format = "specdec's own, 8-bit" if scales else reader.format
    return Checkpoint(folder, format, understood, tuple(reader.fields), used, ignored, weights)
