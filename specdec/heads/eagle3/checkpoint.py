"""Checkpoints of EAGLE heads: understanding whatever a folder holds, strictly.

`Checkpoint.fields` tells what the config said, what the weights showed and what was assumed. Formats: SafeAILab EAGLE-1
to 3, SpecForge and SGLang, vLLM speculators, ModelOpt, and specdec's own. How files are read stands in `files`, how a
config is put together in `reading`, how heads are written in `layouts`.
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
    """Of an EAGLE head."""

    config: Eagle3Config

    def head(self) -> Eagle3Head:
        """The head, in the precision it was saved in; bfloat16 if that was int8."""
        with torch.device("meta"):
            head = Eagle3Head(self.config)
        return filled(head, self.weights, self.path)

    @property
    def borrowed(self) -> list[str]:
        return super().borrowed + (["lm_head.weight"] if self.config.version == 1 else [])


def load(path: str | Path) -> Eagle3Head:
    """A head from a folder or hub id, in any of the formats."""
    return read(path).head()


def read(path: str | Path) -> Checkpoint:
    """Understand the checkpoint in a folder, or of a hub id (downloaded first). Nothing in it is executed."""
    folder = folder_of(path)
    config = read_head_config(folder)
    if is_block(config):
        raise ValueError(f'{folder} is a block-parallel drafter, no EAGLE head: pass "dflash:{path}" as the proposer')
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
