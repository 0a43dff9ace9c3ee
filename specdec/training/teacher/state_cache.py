"""Cache of the target's states over training texts, on disk in shards, so that further epochs need no target pass.

A shard holds some texts, concatenated. It gets its final name only when it is complete.
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
DONE = "states.json"  # marks a folder whose states are complete
Read = Callable[[Sequence[Tensor]], Iterator[tuple[int, Tensor]]]  # see `Teacher.read`


def bytes_per_token(hidden_size: int, taps: Sequence[int]) -> int:
    """Return the disk space that the states of one token take."""
    return (len(taps) + 1) * hidden_size * 2 + 17  # bfloat16; its id, learn flag, and two numbers of its logits


@torch.no_grad()
def extract(
    teacher: Teacher,
    texts: Sequence[Text],
    folder: Path,
    *,
    share: tuple[int, int] = (0, 1),
    progress: Callable[[int], Any] = lambda tokens: None,
    should_continue: Callable[[], bool] = lambda: True,
) -> bool:
    """Write the states of all texts, resuming an earlier run.

    Processes that share the folder and the work all call this. The last one to finish finds the states complete.

    Args:
        teacher: source of the states, and of the results of `TargetLogits.over_all` for tokens to train on.
        texts: texts to run the target over.
        folder: folder for the shards.
        share: index of this process and number of processes. Each writes different shards.
        progress: called after each shard with its number of tokens.
        go_on: called before each missing shard; False stops.

    Returns:
        True if the states are complete.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts = Texts.of(texts)
    bounds = packed(texts.lengths, SHARD_TOKENS).tolist()
    paths = [folder / f"states-{number:05d}.safetensors" for number in range(len(bounds) - 1)]
    mine, processes = share
    for path, part in list(zip(paths, pairwise(bounds), strict=True))[mine::processes]:
        of_shard = texts[slice(*part)]
        if not path.exists():
            if not should_continue():
                return False
            states = _in_order(teacher.read, of_shard)
            over_all = [
                teacher.logits.over_all(state, text.learn) for state, text in zip(states, of_shard, strict=True)
            ]
            tensors = end_to_end(of_shard) | {"states": torch.cat(states), "over_all": torch.cat(over_all)}
            partial = path.with_suffix(f".{gethostname()}.part")  # several machines may share the folder
            save_file(tensors, partial)
            partial.rename(path)
        progress(sum(len(text.ids) for text in of_shard))
    if not all(path.exists() for path in paths):
        return False
    partial = folder / f"{DONE}.{gethostname()}.{mine}.part"
    partial.write_text(json.dumps({"taps": list(teacher.taps), "shards": len(paths)}))
    partial.rename(folder / DONE)
    return True


def states_of(target: PreTrainedModel, taps: Sequence[int], texts: Sequence[Text]) -> list[Tensor]:
    """Compute the target's states (T, C) of each text, in bfloat16 on the CPU."""
    return _in_order(Reader(target, taps).read, texts)


def _in_order(read: Read, texts: Sequence[Text]) -> list[Tensor]:
    """Collect the states (T, C) of each text in order, in bfloat16 on the CPU."""
    out = {i: states.to("cpu", torch.bfloat16) for i, states in read([text.ids for text in texts])}
    return [out[i] for i in range(len(texts))]
