"""`load` and `read`: strict loading of EAGLE heads from checkpoints of all common layouts.

Layouts: SafeAILab EAGLE-1 to 3, SpecForge and SGLang, vLLM speculators, ModelOpt, and specdec's own. `config_reader`
infers the config, `export` writes heads.
"""

from __future__ import annotations

from pathlib import Path

import torch

from specdec.heads.checkpoint import HeadCheckpoint, check_vocabulary, rename_tensors
from specdec.heads.config_fields import read_head_config
from specdec.heads.eagle3.config_reader import ConfigReader
from specdec.heads.eagle3.head import Eagle3Head
from specdec.heads.files import folder_of, read_tensors
from specdec.heads.int8_weights import from_int8
from specdec.models.loading import is_block


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


def read(path: str | Path) -> HeadCheckpoint[Eagle3Head]:
    """Read the checkpoint in a folder or on the hub (downloaded first). Arguments and errors as for `load`."""
    folder = folder_of(path)
    config = read_head_config(folder)
    if is_block(config):
        raise ValueError(f'{folder} is a block drafter, not an EAGLE head: pass "dflash:{path}" as the proposer')
    tensors, scales = from_int8(read_tensors(folder), folder)
    weights, used, ignored = rename_tensors(tensors, folder)
    used |= {name: tuple(scale.shape) for name, scale in scales.items()}
    if "fc.weight" not in weights:
        raise ValueError(f"{folder} holds no fc.weight: it is not an EAGLE head, or its layout is unknown")
    reader = ConfigReader(folder, config, weights, list(used))
    c = reader.config()
    if c.draft_vocab_size == c.vocab_size or c.version == 1:
        weights.setdefault("d2t", torch.zeros(c.draft_vocab_size, dtype=torch.long))
    check_vocabulary(folder, weights.get("d2t"), c)
    layout = "specdec's own, 8-bit" if scales else reader.format
    return HeadCheckpoint(Eagle3Head, folder, layout, c, reader.fields, used, ignored, weights)
