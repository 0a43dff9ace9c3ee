"""The target's states over training texts, computed once and kept in shards: several epochs then cost no target pass.

Owns the files. A shard holds some texts end to end; a half-written one never carries its final name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from socket import gethostname
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from specdec.data.packed_dataset import packed
from specdec.data.texts import Text, Texts, end_to_end
from specdec.training.teacher.base import Teacher
from specdec.training.teacher.state_extractor import Reader

SHARD_TOKENS = 50_000
DONE = "states.json"  # in a folder of states: all are there
Read = Callable[[Sequence[Tensor]], Iterator[tuple[int, Tensor]]]  # see `Teacher.read`


def bytes_per_token(hidden_size: int, taps: Sequence[int]) -> int:
    """Disk that the states of one token take."""
    return (len(taps) + 1) * hidden_size * 2 + 17  # bfloat16; its id, learn flag, and two numbers of its logits


@torch.no_grad()
def extract(
    teacher: Teacher,
    texts: Sequence[Text],
    folder: Path,
    *,
    share: tuple[int, int] = (0, 1),
    progress: Callable[[int], Any] = lambda tokens: None,
    go_on: Callable[[], bool] = lambda: True,
) -> bool:
    """Write the states of all texts, going on where an earlier run stopped. Returns whether all are there.

    Processes that share the folder, and the work, each call it: the last to be done finds all states there.

    Args:
        teacher: its states are kept, and of the distributions that drafts of tokens to learn are compared with what
            `TargetLogits.over_all` says.
        share: which of so many processes this is, whose shards are each their own.
        progress: called with the number of tokens done, as they are. go_on: asked before each shard.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts = Texts.of(texts)
    bounds = packed(texts.lengths, SHARD_TOKENS).tolist()
    paths = [folder / f"states-{number:05d}.safetensors" for number in range(len(bounds) - 1)]
    mine, processes = share
    for path, part in list(zip(paths, pairwise(bounds), strict=True))[mine::processes]:
        of_shard = texts[slice(*part)]
        if not path.exists():
            if not go_on():
                return False
            states = _kept(teacher.read, of_shard)
            over_all = [
                teacher.logits.over_all(state, text.learn) for state, text in zip(states, of_shard, strict=True)
            ]
            _write(path, of_shard, states, over_all)
        progress(sum(len(text.ids) for text in of_shard))
    if not all(path.exists() for path in paths):
        return False
    partial = folder / f"{DONE}.{gethostname()}.{mine}.part"
    partial.write_text(json.dumps({"taps": list(teacher.taps), "shards": len(paths)}))
    partial.rename(folder / DONE)
    return True


def _write(path: Path, texts: Sequence[Text], states: Sequence[Tensor], over_all: Sequence[Tensor]) -> None:
    tensors = end_to_end(texts) | {"states": torch.cat(list(states)), "over_all": torch.cat(list(over_all))}
    partial = path.with_suffix(f".{gethostname()}.part")  # several machines may share the folder
    save_file(tensors, partial)
    partial.rename(path)


def states_of(target: PreTrainedModel, taps: Sequence[int], texts: Sequence[Text]) -> list[Tensor]:
    """(T, C) bfloat16 of each text."""
    return _kept(Reader(target, taps).read, texts)


def _kept(read: Read, texts: Sequence[Text]) -> list[Tensor]:
    """(T, C) bfloat16 of each text, on the CPU."""
    out = {i: states.to("cpu", torch.bfloat16) for i, states in read([text.ids for text in texts])}
    return [out[i] for i in range(len(texts))]
