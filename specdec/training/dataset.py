"""Rows to train on: whole texts packed end to end, with the target's states from disk or without them.

Owns packing and padding. An item: ids (T,), learn (T,), documents (T,) int64 which text each token is of, and states
(T, C) bfloat16 with over_all (T, 2) float32, see `TargetLogits`, where they were kept.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.utils.data import Dataset

from specdec.data.texts import Text

PADDING = -1  # the document that tokens behind a row's end belong to


def packed(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Indices in order, in groups whose lengths add up to `most` at most; a longer one is alone."""
    groups: list[list[int]] = []
    filled = 0
    for i, length in enumerate(lengths):
        if filled + length > most or not groups:
            groups.append([])
            filled = 0
        groups[-1].append(i)
        filled += length
    return groups


@dataclass(frozen=True)
class _Place:
    shard: int
    start: int
    length: int


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
        self._rows = [row for shard in range(len(self._paths)) for row in self._rows_of(shard)]

    def _rows_of(self, shard: int) -> list[list[_Place]]:
        with safe_open(self._paths[shard], "pt") as file:
            if "over_all" not in file.keys():  # noqa: SIM118 (no dict)
                raise ValueError(
                    f"the states in {self.folder} were kept by an earlier version, which did not look at the whole "
                    "vocabulary: remove that folder, and they are computed anew"
                )
            lengths = file.get_tensor("lengths").tolist()
        starts = [0, *accumulate(lengths)]
        places = [
            _Place(shard, start, min(length, self.length)) for start, length in zip(starts, lengths, strict=False)
        ]
        return [[places[i] for i in row] for row in packed([place.length for place in places], self.length)]

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def num_tokens(self) -> int:
        return sum(place.length for row in self._rows for place in row)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        parts: dict[str, list[Tensor]] = {"ids": [], "learn": [], "states": [], "over_all": [], "documents": []}
        row = self._rows[index]  # of one shard
        with safe_open(self._paths[row[0].shard], "pt") as file:
            for number, place in enumerate(row):
                for name in ("ids", "learn", "states", "over_all"):
                    parts[name].append(file.get_slice(name)[place.start : place.start + place.length])
                parts["documents"].append(torch.full((place.length,), number))
        return {name: torch.cat(tensors) for name, tensors in parts.items()}


class PackedTexts(Dataset):
    """The same rows without states, for training that computes them as it goes."""

    def __init__(self, texts: Sequence[Text], length: int):
        self.length = length
        cut = [Text(text.ids[:length], text.learn[:length]) for text in texts]
        self._rows = [[cut[i] for i in row] for row in packed([len(text.ids) for text in cut], length)]

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def num_tokens(self) -> int:
        return sum(len(text.ids) for row in self._rows for text in row)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self._rows[index]
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
