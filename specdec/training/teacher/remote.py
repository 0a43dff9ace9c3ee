"""`ServedTeacher`: a target that another machine runs: its states come by HTTP, as docs/training.md says.

Owns asking for them. All else of the target comes from its weights, which lie here, too, and are not loaded.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from http.client import HTTPException
from itertools import pairwise
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch
from accelerate import PartialState
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor
from transformers import PreTrainedModel

from specdec.data.packed_dataset import packed
from specdec.training.teacher.base import LocalTeacher

TOKENS = 16_384  # that are asked for at once; a longer text is alone
TRIES, AGAIN_IN = 9, 1.0  # seconds, twice as long each time: a server may be started anew
SILENCE = 600.0  # seconds without a byte: a pass may take minutes


class ServedTeacher(LocalTeacher):
    """Of a server at some address.

    Args:
        target: on the disk. taps, normed: see `LocalTeacher`. address: as in "http://host:8100". fingerprint: the
            target's, see `teacher.fingerprint`, which is not asked for again: all weights are read for it.

    Raises:
        ValueError: the server is not there, or has another target.
    """

    fingerprint = ""

    def __init__(
        self, target: PreTrainedModel, taps: Sequence[int], *, address: str, fingerprint: str, normed: bool = True
    ):
        super().__init__(target, taps, normed=normed)
        self.fingerprint, self._address = fingerprint, address.rstrip("/")
        found = described(self._address)["fingerprint"]
        if found not in (None, fingerprint):
            raise ValueError(
                f"{address} serves another target than {self.name}: its weights' fingerprint is {found}, here it is "
                f"{fingerprint}. Start `specdec serve-states {self.name}` there"
            )
        self.logits = self.logits.to(PartialState().device)  # weights come from the disk to the CPU

    def read(self, texts: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        bounds = packed(torch.tensor([len(text) for text in texts]), TOKENS).tolist()
        for start, end in pairwise(bounds):
            yield from enumerate(self._states(texts[start:end]), start)

    def _states(self, texts: Sequence[Tensor]) -> Sequence[Tensor]:
        """(T, C) of each text (T,)."""
        lengths = [len(text) for text in texts]
        asked = {"fingerprint": self.fingerprint, "taps": self.taps, "texts": [text.tolist() for text in texts]}
        body = json.dumps(asked).encode()
        states = _with_retries(self._address, lambda: load(_answer(f"{self._address}/states", body))["states"])
        wide = (len(self.taps) + 1) * self.logits.weight.shape[-1]
        if tuple(states.shape) != (sum(lengths), wide):
            raise ValueError(
                f"{self._address} gave states {tuple(states.shape)}, asked for were {(sum(lengths), wide)}: those that "
                f"enter layers {self.taps}, and the final ones, side by side"
            )
        return states.split(lengths)


def described(address: str) -> dict[str, Any]:
    """What a server says of its target: its name and fingerprint."""
    found = _with_retries(address, lambda: json.loads(_answer(f"{address}/target")), tries=1)
    if not isinstance(found, dict) or "fingerprint" not in found:
        raise ValueError(f"{address} is no server of states: it answers {str(found)[:80]!r} to /target")
    return found


def _answer(address: str, body: bytes | None = None) -> bytes:
    with urlopen(Request(address, body, {"Content-Type": "application/json"}), timeout=SILENCE) as answer:
        return answer.read()


def _with_retries(address: str, ask: Callable[[], Any], tries: int = TRIES) -> Any:
    """What is asked for, again if the line drops or the server is restarted."""
    for left in reversed(range(tries)):
        try:
            return ask()
        except (OSError, HTTPException, SafetensorError, ValueError, KeyError) as error:
            reason = str(error) or type(error).__name__
            if isinstance(error, HTTPError):
                reason = error.read().decode(errors="replace").strip() or reason
                if error.code < 500:
                    raise ValueError(f"{address} refuses to give states: {reason}") from error
            if left == 0:
                raise ValueError(
                    f"{address} gives no states ({reason}): is `specdec serve-states TARGET` at work there? The same "
                    "command goes on from what was finished"
                ) from error
        time.sleep(AGAIN_IN * 2 ** (tries - 1 - left))
    raise AssertionError("the last try returns or raises")
