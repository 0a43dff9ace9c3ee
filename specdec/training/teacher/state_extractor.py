"""Extraction of a target's hidden states over texts. Texts of similar length share a pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.models.hidden_states import Taps
from specdec.models.introspection import device_of


def batch_tokens_of(device: torch.device) -> int:
    """Return the number of padded tokens per target pass. Small passes fit CPU caches."""
    return 1024 if device.type == "cpu" else 16384


def nothing() -> None:
    """Do nothing: the default callback."""


class Reader:
    """Run one target over texts and yield its states.

    Args:
        target: model to run.
        at: taps, see `Taps`.
        batch_tokens: padded tokens per pass. None: see `batch_tokens_of`.

    Attributes:
        before_pass: called before each pass.
    """

    def __init__(self, target: PreTrainedModel, at: Sequence[int], batch_tokens: int | None = None):
        self.target, self.device = target, device_of(target)
        self._taps = Taps(target, at)
        self.before_pass: Callable[[], Any] = nothing
        self._batch_tokens = batch_tokens or batch_tokens_of(self.device)

    @torch.no_grad()
    def read(self, texts: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Yield the index of each text (T,) and its states (T, C), longest first."""
        batch_tokens = self._batch_tokens
        ordered = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        while ordered:
            longest = len(texts[ordered[-1]])
            count = max(1, batch_tokens // longest)
            batch = [i for i in ordered[-count:] if 2 * len(texts[i]) >= longest]  # limit the padding
            try:
                found = self._pass([texts[i] for i in batch])
            except torch.OutOfMemoryError:
                if len(batch) == 1:
                    raise
                batch_tokens //= 2
                continue
            yield from zip(batch, found, strict=True)
            ordered = ordered[: -len(batch)]

    def _pass(self, texts: Sequence[Tensor]) -> list[Tensor]:
        """Compute the states (T, C) of texts (T,) in one pass, padded on the right, which causal attention ignores."""
        self.before_pass()
        ids = torch.nn.utils.rnn.pad_sequence(list(texts), batch_first=True)
        with self._taps.listening() as taken:
            self.target.get_decoder()(input_ids=ids.to(self.device), use_cache=False)
        return [row[: len(text)] for row, text in zip(self._taps.features(taken), texts, strict=True)]
