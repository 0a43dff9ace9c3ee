"""Rows to train on: whole texts packed end to end, with the target's states from disk or without them.

Owns packing and padding. An item: ids (T,), learn (T,), documents (T,) int64 which text each token is of, and states
(T, C) bfloat16 with over_all (T, 2) float32, see `TargetLogits`, where they were kept.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.utils.data import Dataset

from specdec.data.texts import Text, Texts
from specdec.utils.parsing import read_by_library

PADDING = -1  # the document that tokens behind a row's end belong to


def packed(lengths: Tensor, most: int) -> Tensor:
    """(R + 1,) int64: where each group begins, and the last one ends, of texts in order whose lengths (n,) add up to
    `most` at most; a longer one is alone.
    """
    bounds, filled = array("q"), 0
    for i, length in enumerate(lengths.tolist()):
        if filled + length > most or not bounds:
            bounds.append(i)
            filled = 0
        filled += length
    bounds.append(len(lengths))
    return torch.tensor(bounds)


class StateDataset(Dataset):
    """Rows of up to `length` tokens, packed from whole texts; longer texts are cut.

    An item: ids (T,), learn (T,), documents (T,) int64 which text each token is of, states (T, C) bfloat16, over_all
    (T, 2) float32 of the target's logits, see `TargetLogits.over_all`.
    """

    def __init__(self, folder: Path, length: int):
        self.folder, self.length = Path(folder), length
        described = json.loads((self.folder / "states.json").read_text())
        self.taps = tuple(described["taps"])
        self._paths = [self.folder / f"states-{number:05d}.safetensors" for number in range(described["shards"])]
        self._lengths = [self._lengths_of(path) for path in self._paths]  # of a shard's texts, whole
        self._bounds = [packed(lengths.clamp(max=length), length) for lengths in self._lengths]
        self._ends = torch.tensor([len(bounds) - 1 for bounds in self._bounds]).cumsum(0)  # rows up to each shard's end

    def _lengths_of(self, shard: Path) -> Tensor:
        with read_by_library(shard), safe_open(shard, "pt") as file:
            if "over_all" not in file.keys():  # noqa: SIM118 (no dict)
                raise ValueError(
                    f"the states in {self.folder} were kept by an earlier version, which did not look at the whole "
                    "vocabulary: remove that folder, and they are computed anew"
                )
            return file.get_tensor("lengths")

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def num_tokens(self) -> int:
        return sum(int(lengths.clamp(max=self.length).sum()) for lengths in self._lengths)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        parts: dict[str, list[Tensor]] = {"ids": [], "learn": [], "states": [], "over_all": [], "documents": []}
        index %= len(self)
        shard = int(torch.searchsorted(self._ends, index, right=True))
        lengths, bounds = self._lengths[shard], self._bounds[shard]
        row = index - int(self._ends[shard]) + len(bounds) - 1  # of the shard's
        (first, end), ends = bounds[row : row + 2].tolist(), lengths.cumsum(0)
        with safe_open(self._paths[shard], "pt") as file:
            for number, text in enumerate(range(first, end)):
                start, length = int(ends[text] - lengths[text]), min(int(lengths[text]), self.length)
                for name in ("ids", "learn", "states", "over_all"):
                    parts[name].append(file.get_slice(name)[start : start + length])
                parts["documents"].append(torch.full((length,), number))
        return {name: torch.cat(tensors) for name, tensors in parts.items()}


class PackedTexts(Dataset):
    """The same rows without states, for training that computes them as it goes."""

    def __init__(self, texts: Sequence[Text], length: int):
        self.length, self._texts = length, Texts.of(texts)
        self._bounds = packed(self._texts.lengths.clamp(max=length), length)

    def __len__(self) -> int:
        return len(self._bounds) - 1

    @property
    def num_tokens(self) -> int:
        return int(self._texts.lengths.clamp(max=self.length).sum())

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        first, end = self._bounds[index : index + 2].tolist()
        row = [Text(text.ids[: self.length], text.learn[: self.length]) for text in self._texts[first:end]]
        return {
            "ids": torch.cat([text.ids for text in row]),
            "learn": torch.cat([text.learn for text in row]),
            "documents": torch.cat([torch.full_like(text.ids, number) for number, text in enumerate(row)]),
        }


def collate(items: Sequence[dict[str, Tensor]], length: int = 0) -> dict[str, Tensor]:
    """A batch, padded on the right to `length` at least, with documents of their own that nothing is learnt from."""
    longest = max(length, *(len(item["ids"]) for item in items))
    fill = {"ids": 0, "learn": 0, "states": 0, "over_all": 0, "documents": PADDING}

    def padded(tensor: Tensor, name: str) -> Tensor:
        extra = longest - len(tensor)
        return torch.nn.functional.pad(tensor, (0, 0, 0, extra) if tensor.dim() == 2 else (0, extra), value=fill[name])

    return {name: torch.stack([padded(item[name], name) for item in items]) for name in items[0]}
