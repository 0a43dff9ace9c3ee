"""`Text`: tokens, and which of them the target wrote itself; `Texts`: many of them, in memory or in a file.

Owns the file: one behind the other, so that those of ten million conversations are three tensors, which every process
maps and none holds.
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
    """ids: (T,) int64. learn: (T,) bool, the tokens that are the target's own."""

    ids: Tensor
    learn: Tensor


class Texts(Sequence[Text]):
    """n texts of N tokens in all, end to end.

    Args:
        ids: (N,) int32 or int64. learn: (N,) bool. lengths: (n,) int64.
    """

    def __init__(self, ids: Tensor, learn: Tensor, lengths: Tensor):
        self.ids, self.learn, self.lengths = ids, learn, lengths
        self._ends = lengths.cumsum(0)

    @classmethod
    def of(cls, texts: Sequence[Text]) -> Texts:
        """These, which are in memory unless they are `Texts` already."""
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
    """Texts as they lie in files: ids and learn flags of all, one behind the other, and each one's length."""
    return {
        "ids": torch.cat([text.ids for text in texts]),
        "learn": torch.cat([text.learn for text in texts]),
        "lengths": torch.tensor([len(text.ids) for text in texts]),
    }


def keep(texts: Iterable[Text], file: Path) -> Texts:
    """Write texts one by one, whole or not at all, as safetensors; what `kept_texts` reads of them."""
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
    return kept_texts(file)


def _join(out: IO[bytes], lengths: array[int], ids: IO[bytes], learn: IO[bytes]) -> None:
    """A safetensors file: how long its header is, the header, and the tensors, those of wide entries first."""
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


def kept_texts(file: Path) -> Texts:
    """What `keep` wrote. It stays in the file, of which the system brings to memory what is looked at."""
    with read_by_library(file):
        return Texts(**load_file(file))
