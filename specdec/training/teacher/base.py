"""`Teacher`: what heads learn from: the one place where training touches the target.

Owns what is asked of the target in training: its states, its embedding, how it makes logits, which one it is. How a
fresh head starts out from a target's weights stands in `initialisation`, how the two decode in `evaluation`.
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
from specdec.heads.embeddings import beside, embed_tokens
from specdec.heads.kinds import Head
from specdec.models.hidden_states import FINAL
from specdec.models.introspection import decoder_layers
from specdec.training.teacher.state_extractor import Reader
from specdec.training.teacher.target_logits import TargetLogits
from specdec.training.teacher.unsharded import plain


class Teacher(ABC):
    """A target, as a head in training sees it.

    Attributes:
        name: path or hub id. fingerprint: tells apart models of one shape.
        taps: whose states the head reads, as `Taps` counts; the final state comes behind them.
        embedding: (V, H), of the target's tokens as the head reads them. logits: how the target makes them.
        together: it lies in several processes, and all of them ask at once, for whatever one needs.
    """

    name: str
    fingerprint: str
    taps: tuple[int, ...]
    embedding: Tensor
    logits: TargetLogits
    together = False

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Around what processes `read`, each its own, of a target whose passes they make together."""
        yield

    @abstractmethod
    def read(self, texts: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Which text, and its states (T, C), the final one last; in any order. texts: (T,) int64."""

    @abstractmethod
    def model(self) -> PreTrainedModel:
        """The target itself, to decode with."""

    @torch.no_grad()
    def states(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """A batch as `collate` makes it, with its `states` (B, T, C) and `over_all` (B, T, 2), see `TargetLogits`.

        As they come from the disk, or else computed: each document alone, those of like length in one pass.
        """
        return batch if "states" in batch else self._computed(batch)

    def _computed(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """`states` of a batch that came without them."""
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
    """A target that is loaded here, also on several devices.

    Args:
        normed: see `embed_tokens`. batch_tokens: see `Reader`.
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
        """That gives what `head` reads of its target. more: of the class."""
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
    """Whose states a head reads of its target, as `Taps` counts."""
    return tuple(head.config.taps(len(decoder_layers(target))))


@torch.no_grad()
def embedding_of(target: PreTrainedModel, normed: bool = True) -> Tensor:
    """(V, H) as the target's embedding module gives it: Gemma's scales its rows.

    Args:
        normed: see `embed_tokens`.
    """
    module = plain(target.get_input_embeddings())
    rows = beside(module.weight, torch.arange(module.weight.shape[0]))
    return torch.cat([embed_tokens(module, part, normed) for part in rows.split(4096)])


def fingerprint(target: PreTrainedModel) -> str:
    """Tells apart models of one shape, by a few entries of each tensor. Where these lie in several processes, all of
    them must ask.
    """
    content = hashlib.sha256()
    for name, tensor in target.state_dict().items():
        flat = _here(target, name, tensor).flatten()
        content.update(flat[:: max(1, len(flat) // 64)].float().cpu().numpy().tobytes())
    return content.hexdigest()[:16]


def _here(target: PreTrainedModel, name: str, tensor: Any) -> Tensor:
    """All of a target's tensor, of which a part is elsewhere: with other processes, or where accelerate keeps it."""
    if hasattr(tensor, "full_tensor"):
        return tensor.full_tensor()
    if not tensor.is_meta:
        return tensor.dequantize() if hasattr(tensor, "__tensor_flatten__") else tensor  # torchao
    module, _, own = name.rpartition(".")
    with align_module_device(target.get_submodule(module)):
        return getattr(target.get_submodule(module), own).detach()
