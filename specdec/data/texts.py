"""`Text`: tokens, and which of them the target wrote itself; many of them in a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


@dataclass(frozen=True)
class Text:
    """ids: (T,) int64. learn: (T,) bool, the tokens that are the target's own."""

    ids: Tensor
    learn: Tensor


def end_to_end(texts: Sequence[Text]) -> dict[str, Tensor]:
    """Texts as they lie in files: ids and learn flags of all, one behind the other, and each one's length."""
    return {
        "ids": torch.cat([text.ids for text in texts]),
        "learn": torch.cat([text.learn for text in texts]),
        "lengths": torch.tensor([len(text.ids) for text in texts]),
    }


def keep(texts: Sequence[Text], file: Path) -> None:
    """Write texts, whole or not at all."""
    partial = file.with_suffix(".part")
    save_file(end_to_end(texts), partial)
    partial.rename(file)


def kept_texts(file: Path) -> list[Text]:
    """What `keep` wrote."""
    found = load_file(file)
    lengths = found["lengths"].tolist()
    parts = zip(found["ids"].split(lengths), found["learn"].split(lengths), strict=True)
    return [Text(ids, learn) for ids, learn in parts]
