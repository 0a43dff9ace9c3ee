"""`read`: reads DFlash, DFlash 2, JetSpec, Domino and DSpark drafters.

Layouts: z-lab's, which JetSpec and Domino use as well, DeepSpec's, transformers' own `speculation_type="dflash"`
models, vLLM speculators' `dflash`, `dflash2` and `dspark`. `specdec.heads.loading` reads these and other drafters.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from specdec.heads.checkpoint import RULES, HeadCheckpoint, check_vocabulary, rename_tensors
from specdec.heads.config_fields import read_head_config
from specdec.heads.dflash.config_reader import BlockReader
from specdec.heads.dflash.head import DFlashHead
from specdec.heads.files import read_tensors

BLOCK_RULES = (
    *RULES,
    (re.compile(r"prefix_gru\.weight_ih_l0"), r"domino_head.input_gates.weight"),
    (re.compile(r"prefix_gru\.weight_hh_l0"), r"domino_head.state_gates.weight"),
    (re.compile(r"embed_proj\.0\.weight"), r"domino_head.down_proj.weight"),
    (re.compile(r"embed_proj\.2\.weight"), r"domino_head.up_proj.weight"),
    (re.compile(r"candidate_selector\.(\w+_codebook)"), r"candidate_selector.\1.weight"),
)


def read(folder: Path) -> HeadCheckpoint[DFlashHead]:
    """Read the checkpoint in a folder. Errors as for `specdec.heads.loading.load`."""
    weights, used, ignored = rename_tensors(read_tensors(folder), folder, BLOCK_RULES)
    if "fc.weight" not in weights:
        raise ValueError(f"{folder} holds no fc.weight: it is not a drafter that reads the target's hidden states")
    reader = BlockReader(folder, read_head_config(folder), weights, list(used))
    c = reader.config()
    if c.own_head:
        if c.draft_vocab_size == c.vocab_size:
            weights.setdefault("d2t", torch.zeros(c.draft_vocab_size, dtype=torch.long))
        check_vocabulary(folder, weights.get("d2t"), c)
    return HeadCheckpoint(DFlashHead, folder, reader.format, c, reader.fields, used, ignored, weights)
