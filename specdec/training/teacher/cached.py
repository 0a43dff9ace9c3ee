"""Teacher for a target whose states over all texts are on the disk.

The rest of the target that training needs is in a file next to the states. The target is loaded only while a head is
evaluated with the decoder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from socket import gethostname
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from specdec.training.teacher.base import Teacher, fingerprint
from specdec.training.teacher.target_logits import TargetLogits
from specdec.utils.parsing import read_by_library


class CachedTeacher(Teacher):
    """Teacher read from a file that `save_teacher` wrote.

    Args:
        file: file to read.
        load: loads the target.
        together: see `Teacher`.
    """

    def __init__(self, file: Path, load: Callable[[], PreTrainedModel], collective: bool = False):
        self._file, self._load, self.collective = file, load, collective
        with read_by_library(file), safe_open(file, "pt") as stored:
            described: dict[str, Any] = json.loads(stored.metadata()["teacher"])
        self.name, self.fingerprint = described["name"], described["fingerprint"]
        self.taps, self._scale, self._cap = tuple(described["taps"]), described["scale"], described["cap"]

    @property
    def embedding(self) -> Tensor:  # type: ignore[override]
        embedding = self._stored("embedding")
        return self.logits.weight if embedding is None else embedding

    @property
    def logits(self) -> TargetLogits:  # type: ignore[override]
        weight = self._stored("lm_head.weight")
        assert weight is not None
        return TargetLogits(weight, self._stored("lm_head.bias"), self._scale, self._cap)

    def _stored(self, name: str) -> Tensor | None:
        with safe_open(self._file, "pt") as stored:
            return stored.get_tensor(name) if name in stored.keys() else None  # noqa: SIM118 (no dict)

    def read(self, texts: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        raise ValueError(f"states are missing next to {self._file}: remove that folder, and they are computed again")

    def model(self) -> PreTrainedModel:
        """Load the target. The caller releases it.

        Raises:
            ValueError: Its weights are not those that the states were computed with.
        """
        target = self._load()
        if fingerprint(target) != self.fingerprint:
            raise ValueError(
                f"the weights of {self.name} are not those whose states are next to {self._file}: restore them, or "
                "choose another folder"
            )
        return target


def save_teacher(teacher: Teacher, file: Path, writes: bool = True) -> None:
    """Write what training needs of a target besides its states. A tied embedding and LM head are stored once.

    All processes of a sharded teacher must call this. writes: True in the process that writes.
    """
    logits, embedding = teacher.logits, teacher.embedding
    tensors = {"lm_head.weight": logits.weight, "lm_head.bias": logits.bias, "embedding": embedding}
    if embedding.dtype == logits.weight.dtype and torch.equal(embedding, logits.weight.to(embedding.device)):
        del tensors["embedding"]
    described: dict[str, Any] = {"name": teacher.name, "fingerprint": teacher.fingerprint, "taps": teacher.taps}
    described |= {"scale": logits.scale, "cap": logits.cap}
    if not writes:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(f".{gethostname()}.part")  # several machines may share the folder
    here = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items() if tensor is not None}
    save_file(here, partial, {"teacher": json.dumps(described)})
    partial.rename(file)
