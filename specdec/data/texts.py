"""`Text`: token ids and a mask of those to train on; `Texts`: many of them, in memory or in a file.

A file stores all texts end to end, so ten million conversations are three tensors that each process memory-maps.
"""

from __future__ import annotations

import json
import shutil
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, overload

import torch
from safetensors.torch import load_file
from torch import Tensor

from specdec.utils.parsing import read_by_library


@dataclass(frozen=True)
class Text:
    """Token ids of one text.

    Args:
        ids: (T,) int64.
        learn: (T,) bool, True for tokens to train on: those of answers, or of a plain text.
    """

    ids: Tensor
    learn: Tensor


class Texts(Sequence[Text]):
    """Sequence of n texts with N tokens in total, stored end to end.

    Args:
        ids: (N,) int32 or int64.
        learn: (N,) bool.
        lengths: (n,) int64.
    """

    def __init__(self, ids: Tensor, learn: Tensor, lengths: Tensor):
        self.ids, self.learn, self.lengths = ids, learn, lengths
        self._ends = lengths.cumsum(0)

    @classmethod
    def of(cls, texts: Sequence[Text]) -> Texts:
        """Convert texts to `Texts` in memory, unless they are `Texts` already."""
        return texts if isinstance(texts, Texts) else cls(**end_to_end(texts))

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> Text: ...
    @overload
    def __getitem__(self, index: slice) -> list[Text]: ...
    def __getitem__(self, index: int | slice) -> Text | list[Text]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        end = int(self._ends[index])
        part = slice(end - int(self.lengths[index]), end)
        return Text(self.ids[part].long(), self.learn[part])


def end_to_end(texts: Sequence[Text]) -> dict[str, Tensor]:
    """Concatenate the ids and learn flags of all texts. Returns the arguments of `Texts`."""
    return {
        "ids": torch.cat([text.ids for text in texts]),
        "learn": torch.cat([text.learn for text in texts]),
        "lengths": torch.tensor([len(text.ids) for text in texts]),
    }


def save_texts(texts: Iterable[Text], file: Path) -> Texts:
    """Write texts one by one into a safetensors file, atomically, and return them as `load_texts` reads them."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lengths = array("q")
    with TemporaryFile(dir=file.parent) as ids, TemporaryFile(dir=file.parent) as learn:
        for text in texts:
            ids.write(text.ids.int().numpy().tobytes())
            learn.write(text.learn.bool().numpy().tobytes())
            lengths.append(len(text.ids))
        partial = file.with_suffix(".part")
        with partial.open("wb") as out:
            _join(out, lengths, ids, learn)
        partial.rename(file)
    return load_texts(file)


def _join(out: IO[bytes], lengths: array[int], ids: IO[bytes], learn: IO[bytes]) -> None:
    """Write a safetensors file: the length of its header, the header, and the tensors, widest dtype first."""
    kinds = {"lengths": ("I64", 8, len(lengths)), "ids": ("I32", 4, sum(lengths)), "learn": ("BOOL", 1, sum(lengths))}
    header, start = {}, 0
    for name, (dtype, width, count) in kinds.items():
        header[name] = {"dtype": dtype, "shape": [count], "data_offsets": [start, start + width * count]}
        start += width * count
    described = json.dumps(header).encode()
    described += b" " * (-len(described) % 8)
    out.write(len(described).to_bytes(8, "little") + described + lengths.tobytes())
    for part in (ids, learn):
        part.seek(0)
        shutil.copyfileobj(part, out, 2**20)


def load_texts(file: Path) -> Texts:
    """Memory-map a file that `save_texts` wrote: the system loads only the parts that are used."""
    with read_by_library(file):
        return Texts(**load_file(file))
