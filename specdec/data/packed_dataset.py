"""Training rows: whole texts packed end to end, with the target's states from disk or without them."""

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

PADDING = -1  # document index of the padding after a row


def packed(lengths: Tensor, most: int) -> Tensor:
    """Group consecutive texts so that each group has at most `most` tokens; a longer text is a group of its own.

    Args:
        lengths: (n,) int64, tokens of each text.
        most: maximum tokens of a group.

    Returns:
        (R + 1,) int64, index of the first text of each of R groups, followed by n.
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
    """Rows of up to `length` tokens, packed from whole texts, with the target's states. Longer texts are cut.

    An item is a dictionary: ids (T,), learn (T,), documents (T,) int64 with the index of each token's text, states
    (T, C) bfloat16, and over_all (T, 2) float32, see `TargetLogits.over_all`.

    Args:
        folder: folder with the recorded states.
        length: maximum tokens of a row.

    Raises:
        ValueError: the states were recorded by an earlier version.
    """

    def __init__(self, folder: Path, length: int):
        self.folder, self.length = Path(folder), length
        described = json.loads((self.folder / "states.json").read_text())
        self.taps = tuple(described["taps"])
        self._paths = [self.folder / f"states-{number:05d}.safetensors" for number in range(described["shards"])]
        self._lengths = [self._lengths_of(path) for path in self._paths]  # of each shard's uncut texts
        self._bounds = [packed(lengths.clamp(max=length), length) for lengths in self._lengths]
        rows = torch.tensor([len(bounds) - 1 for bounds in self._bounds])
        self._ends = rows.cumsum(0)  # rows up to the end of each shard

    def _lengths_of(self, shard: Path) -> Tensor:
        with read_by_library(shard), safe_open(shard, "pt") as file:
            if "over_all" not in file.keys():  # noqa: SIM118 (no dict)
                raise ValueError(
                    f"the states in {self.folder} were recorded by an earlier version, without the logits of the whole "
                    "vocabulary: remove this folder to compute them again"
                )
            return file.get_tensor("lengths")

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def num_tokens(self) -> int:
        return sum(int(lengths.clamp(max=self.length).sum()) for lengths in self._lengths)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        index = range(len(self))[index]  # IndexError if out of range
        parts: dict[str, list[Tensor]] = {"ids": [], "learn": [], "states": [], "over_all": [], "documents": []}
        shard = int(torch.searchsorted(self._ends, index, right=True))
        lengths, bounds = self._lengths[shard], self._bounds[shard]
        row = index - int(self._ends[shard]) + len(bounds) - 1  # within the shard
        (first, end), ends = bounds[row : row + 2].tolist(), lengths.cumsum(0)
        with safe_open(self._paths[shard], "pt") as file:
            for number, text in enumerate(range(first, end)):
                start, length = int(ends[text] - lengths[text]), min(int(lengths[text]), self.length)
                for name in ("ids", "learn", "states", "over_all"):
                    parts[name].append(file.get_slice(name)[start : start + length])
                parts["documents"].append(torch.full((length,), number))
        return {name: torch.cat(tensors) for name, tensors in parts.items()}


class PackedTexts(Dataset):
    """Rows packed like those of `StateDataset` but without states, for training that computes them on the fly."""

    def __init__(self, texts: Sequence[Text], length: int):
        self.length, self._texts = length, Texts.of(texts)
        self._bounds = packed(self._texts.lengths.clamp(max=length), length)

    def __len__(self) -> int:
        return len(self._bounds) - 1

    @property
    def num_tokens(self) -> int:
        return int(self._texts.lengths.clamp(max=self.length).sum())

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        index = range(len(self))[index]  # IndexError if out of range
        first, end = self._bounds[index : index + 2].tolist()
        row = [Text(text.ids[: self.length], text.learn[: self.length]) for text in self._texts[first:end]]
        return {
            "ids": torch.cat([text.ids for text in row]),
            "learn": torch.cat([text.learn for text in row]),
            "documents": torch.cat([torch.full_like(text.ids, number) for number, text in enumerate(row)]),
        }


def collate(items: Sequence[dict[str, Tensor]], length: int = 0) -> dict[str, Tensor]:
    """Stack items into a batch, padded on the right to at least `length`. The padding is not trained on."""
    longest = max(length, *(len(item["ids"]) for item in items))
    fill = {"ids": 0, "learn": 0, "states": 0, "over_all": 0, "documents": PADDING}

    def padded(tensor: Tensor, name: str) -> Tensor:
        extra = longest - len(tensor)
        return torch.nn.functional.pad(tensor, (0, 0, 0, extra) if tensor.dim() == 2 else (0, extra), value=fill[name])

    return {name: torch.stack([padded(item[name], name) for item in items]) for name in items[0]}
