"""Teachers: sources of the target's states, embedding and logits during training.

Only two other parts of training use the target: `initialization` copies its weights, and `evaluate` decodes with it.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import align_module_device
from torch import Tensor
from transformers import PreTrainedModel

from specdec.data.packed_dataset import PADDING
from specdec.heads.dflash.head import DFlashHead
from specdec.heads.embeddings import embed_tokens, to_device_of
from specdec.heads.kinds import Head
from specdec.models.hidden_states import FINAL
from specdec.models.introspection import decoder_layers
from specdec.training.teacher.state_extractor import Reader
from specdec.training.teacher.target_logits import TargetLogits
from specdec.training.teacher.unsharded import materialized


class Teacher(ABC):
    """Target as seen by a head in training.

    Attributes:
        name: path or hub id of the target.
        fingerprint: checksum of the weights, which distinguishes models of the same shape.
        taps: layers whose states the head reads, as `Taps` counts. The final state is concatenated last.
        embedding: (V, H), the target's token embeddings as the head reads them.
        logits: maps the target's final states to its logits.
        together: True if the target is sharded over several processes, so that all of them must call it together.
    """

    name: str
    fingerprint: str
    taps: tuple[int, ...]
    embedding: Tensor
    logits: TargetLogits
    collective = False

    @contextmanager
    def lockstep(self) -> Iterator[None]:
        """Context in which processes `read` different texts with a target whose passes they run together."""
        yield

    @abstractmethod
    def read(self, texts: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Run the target over texts.

        Args:
            texts: token ids, (T,) int64 each.

        Yields:
            Index of a text and its states (T, C), the final state last, in any order.
        """

    @abstractmethod
    def model(self) -> PreTrainedModel:
        """Return the target itself, to decode with."""

    @torch.no_grad()
    def states(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Add the target's states to a batch, unless they were read from the disk with it.

        Each document is computed separately; documents of similar length share a pass.

        Args:
            batch: as `collate` makes it.

        Returns:
            The batch with `states` (B, T, C) and `over_all` (B, T, 2), see `TargetLogits.over_all`.
        """
        return batch if "states" in batch else self._computed(batch)

    def _computed(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Implement `states` for a batch that came without them."""
        ids, documents = batch["ids"], batch["documents"]
        places = [
            (row, (documents[row] == number).nonzero()[:, 0])
            for row in range(len(ids))
            for number in documents[row].unique().tolist()
            if number != PADDING
        ]
        found = dict(self.read([ids[row, where] for row, where in places]))
        states = ids.new_zeros(*ids.shape, found[0].shape[-1], dtype=found[0].dtype)
        for number, (row, where) in enumerate(places):
            states[row, where] = found[number].to(ids.device)
        return batch | {"states": states, "over_all": self.logits.over_all(states, batch["learn"])}


class LocalTeacher(Teacher):
    """Target that is loaded in this process, on one or several devices.

    Args:
        target: model to read states from.
        taps: layers whose states the head reads, as `Taps` counts.
        normed: see `embed_tokens`.
        batch_tokens: see `Reader`.

    Example:
        ```python
        teacher = LocalTeacher.of(target, head)
        trainer = HeadTrainer(head, teacher, args, train_dataset=rows)
        ```
    """

    def __init__(
        self,
        target: PreTrainedModel,
        taps: Sequence[int],
        *,
        normed: bool = True,
        batch_tokens: int | None = None,
    ):
        self._target, self._normed = target, normed
        self.name, self.taps = str(getattr(target.config, "_name_or_path", "")), tuple(taps)
        self.logits = TargetLogits.of(target)
        self.reader = Reader(target, [*taps, FINAL], batch_tokens)

    @classmethod
    def of(cls, target: PreTrainedModel, head: Head, **more: Any) -> LocalTeacher:
        """Create a teacher with the taps that `head` reads of its target. more: further arguments of the class."""
        return cls(target, taps_of(head, target), normed=not isinstance(head, DFlashHead), **more)

    @property
    def embedding(self) -> Tensor:  # type: ignore[override]
        return embedding_of(self._target, self._normed)

    @property
    def fingerprint(self) -> str:  # type: ignore[override]
        return fingerprint(self._target)

    def read(self, texts: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        return self.reader.read(texts)

    def model(self) -> PreTrainedModel:
        return self._target


def taps_of(head: Head, target: PreTrainedModel) -> tuple[int, ...]:
    """Return the layers of its target whose states a head reads, as `Taps` counts."""
    return tuple(head.config.taps(len(decoder_layers(target))))


@torch.no_grad()
def embedding_of(target: PreTrainedModel, normed: bool = True) -> Tensor:
    """Return the output of the target's embedding module for all tokens, (V, H). normed: see `embed_tokens`."""
    module = materialized(target.get_input_embeddings())
    rows = to_device_of(module.weight, torch.arange(module.weight.shape[0]))
    return torch.cat([embed_tokens(module, part, normed) for part in rows.split(4096)])


def fingerprint(target: PreTrainedModel) -> str:
    """Compute a checksum of a few entries of each weight, which distinguishes models of the same shape.

    If the weights are sharded over processes, all of them must call this.
    """
    content = hashlib.sha256()
    for name, tensor in target.state_dict().items():
        flat = _here(target, name, tensor).flatten()
        content.update(flat[:: max(1, len(flat) // 64)].float().cpu().numpy().tobytes())
    return content.hexdigest()[:16]


def _here(target: PreTrainedModel, name: str, tensor: Any) -> Tensor:
    """Return a complete tensor of the target, of which parts may be in other processes or offloaded by accelerate."""
    if hasattr(tensor, "full_tensor"):
        return tensor.full_tensor()
    if not tensor.is_meta:
        return tensor.dequantize() if hasattr(tensor, "__tensor_flatten__") else tensor  # torchao
    module, _, own = name.rpartition(".")
    with align_module_device(target.get_submodule(module)):
        return getattr(target.get_submodule(module), own).detach()
