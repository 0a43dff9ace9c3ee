"""The target's states over training texts, computed once and kept in shards: several epochs then cost no target pass.

Owns the files. A shard holds some texts end to end; a half-written one never carries its final name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from specdec.eagle3.texts import Text
from specdec.taps import FINAL, Taps

SHARD_TOKENS = 50_000
PADDING = -1  # the document that tokens behind a row's end belong to


def bytes_per_token(target: PreTrainedModel, taps: Sequence[int]) -> int:
    """Disk that the states of one token take."""
    width = target.config.get_text_config(decoder=True).hidden_size
    return (len(taps) + 1) * width * 2 + 9  # bfloat16, and its id and learn flag


@torch.no_grad()
def extract(
    target: PreTrainedModel,
    texts: Sequence[Text],
    taps: Sequence[int],
    folder: Path,
    *,
    batch_tokens: int | None = None,
    progress: Callable[[int], Any] = lambda tokens: None,
    go_on: Callable[[], bool] = lambda: True,
) -> bool:
    """Write the states of all texts, going on where an earlier run stopped. Returns whether all are there.

    Args:
        taps: see `Taps`; the final state is kept beside them. batch_tokens: padded, per target pass;
            None: 16384, on CPUs 1024, which their caches like better (1.15x as fast on the 0.5B).
        progress: called with the number of tokens done, as they are. go_on: asked before each shard.
    """
    folder.mkdir(parents=True, exist_ok=True)
    listener = Taps(target, [*taps, FINAL])
    batch_tokens = batch_tokens or (1024 if target.device.type == "cpu" else 16384)
    for number, members in enumerate(_shards(texts)):
        path = folder / f"states-{number:05d}.safetensors"
        tokens = sum(len(texts[i].ids) for i in members)
        if not path.exists():
            if not go_on():
                return False
            _write(path, [texts[i] for i in members], _states(target, listener, texts, members, batch_tokens), taps)
        progress(tokens)
    partial = folder / "states.json.part"
    partial.write_text(json.dumps({"taps": list(taps), "shards": number + 1}))
    partial.rename(folder / "states.json")
    return True


def _shards(texts: Sequence[Text]) -> list[list[int]]:
    shards: list[list[int]] = []
    filled = SHARD_TOKENS
    for i, text in enumerate(texts):
        if filled + len(text.ids) > SHARD_TOKENS:
            shards.append([])
            filled = 0
        shards[-1].append(i)
        filled += len(text.ids)
    return shards


def _states(
    target: PreTrainedModel, listener: Taps, texts: Sequence[Text], members: Sequence[int], batch_tokens: int
) -> dict[int, Tensor]:
    """(T, C) of each text; texts of like length share a pass, padded on the right, which causal attention ignores."""
    out: dict[int, Tensor] = {}
    ordered = sorted(members, key=lambda i: len(texts[i].ids))
    while ordered:
        longest = len(texts[ordered[-1]].ids)
        batch, ordered = ordered[-max(1, batch_tokens // longest) :], ordered[: -max(1, batch_tokens // longest)]
        ids = torch.nn.utils.rnn.pad_sequence([texts[i].ids for i in batch], batch_first=True)
        with listener.listening():
            target.get_decoder()(input_ids=ids.to(target.device), use_cache=False)
        for row, i in zip(listener.features(), batch, strict=True):
            out[i] = row[: len(texts[i].ids)].to("cpu", torch.bfloat16)
    return {i: out[i] for i in members}


@torch.no_grad()
def states_of_packed(target: PreTrainedModel, listener: Taps, batch: dict[str, Tensor]) -> Tensor:
    """(B, T, C) of rows as `collate` makes them: each document alone, in one target pass."""
    ids, documents = batch["ids"], batch["documents"]
    places = [
        (row, (documents[row] == number).nonzero()[:, 0])
        for row in range(len(ids))
        for number in documents[row].unique().tolist()
        if number != PADDING
    ]
    parts = [ids[row, where] for row, where in places]
    padded = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
    with listener.listening():
        target.get_decoder()(input_ids=padded.to(target.device), use_cache=False)
    found = listener.features()
    states = found.new_zeros(*ids.shape, found.shape[-1])
    for (row, where), of_it in zip(places, found, strict=True):
        states[row, where.to(found.device)] = of_it[: len(where)]
    return states.to(ids.device)


def _write(path: Path, texts: Sequence[Text], states: dict[int, Tensor], taps: Sequence[int]) -> None:
    tensors = {
        "ids": torch.cat([text.ids for text in texts]),
        "learn": torch.cat([text.learn for text in texts]),
        "lengths": torch.tensor([len(text.ids) for text in texts]),
        "states": torch.cat(list(states.values())),
    }
    partial = path.with_suffix(f".{os.getpid()}.part")  # several machines may share the folder
    save_file(tensors, partial)
    partial.rename(path)


@dataclass(frozen=True)
class _Place:
    shard: int
    start: int
    length: int


class StateDataset(Dataset):
    """Rows of up to `length` tokens, packed from whole texts; longer texts are cut.

    An item: ids (T,), learn (T,), documents (T,) int64 which text each token is of, states (T, C) bfloat16.
    """

    def __init__(self, folder: Path, length: int):
        self.folder, self.length = Path(folder), length
        described = json.loads((self.folder / "states.json").read_text())
        self.taps = tuple(described["taps"])
        self._paths = [self.folder / f"states-{number:05d}.safetensors" for number in range(described["shards"])]
        self._rows: list[list[_Place]] = []
        for shard, path in enumerate(self._paths):
            self._pack(shard, path)

    def _pack(self, shard: int, path: Path) -> None:
        with safe_open(path, "pt") as file:
            lengths = file.get_tensor("lengths").tolist()
        start, filled = 0, self.length
        for length in lengths:
            kept = min(length, self.length)
            if filled + kept > self.length:
                self._rows.append([])
                filled = 0
            self._rows[-1].append(_Place(shard, start, kept))
            filled += kept
            start += length

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def num_tokens(self) -> int:
        return sum(place.length for row in self._rows for place in row)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        parts: dict[str, list[Tensor]] = {"ids": [], "learn": [], "states": [], "documents": []}
        for number, place in enumerate(self._rows[index]):
            with safe_open(self._paths[place.shard], "pt") as file:
                for name in ("ids", "learn", "states"):
                    parts[name].append(file.get_slice(name)[place.start : place.start + place.length])
            parts["documents"].append(torch.full((place.length,), number))
        return {name: torch.cat(tensors) for name, tensors in parts.items()}


class PackedTexts(Dataset):
    """The same rows without states, for training that computes them as it goes."""

    def __init__(self, texts: Sequence[Text], length: int):
        self.length = length
        self._rows: list[list[Text]] = []
        filled = length
        for text in texts:
            kept = Text(text.ids[:length], text.learn[:length])
            if filled + len(kept.ids) > length:
                self._rows.append([])
                filled = 0
            self._rows[-1].append(kept)
            filled += len(kept.ids)

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
    fill = {"ids": 0, "learn": 0, "states": 0, "documents": PADDING}

    def padded(tensor: Tensor, name: str) -> Tensor:
        extra = longest - len(tensor)
        return torch.nn.functional.pad(tensor, (0, 0, 0, extra) if tensor.dim() == 2 else (0, extra), value=fill[name])

    return {name: torch.stack([padded(item[name], name) for item in items]) for name in items[0]}
