"""Teacher for a target that runs on another machine. Its states come over HTTP; the protocol is in docs/training.md.

Embedding and LM head are read from the target's weights, which must also be on this machine but are not loaded.
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

TOKENS = 16_384  # tokens per request; a longer text is sent by itself
TRIES, RETRY_DELAY = 9, 1.0  # attempts, and seconds before the second one, which double: the server may be restarting
TIMEOUT = 600.0  # timeout in seconds without a byte: a pass may take minutes


class ServedTeacher(LocalTeacher):
    """Teacher that reads states from a server.

    Args:
        target: model whose weights are on the disk.
        taps: see `LocalTeacher`.
        address: address of the server, such as "http://host:8100".
        fingerprint: the target's `fingerprint`. It is passed in because computing it reads all weights.
        normed: see `LocalTeacher`.

    Raises:
        ValueError: The server cannot be reached, or serves another target.
    """

    fingerprint = ""

    def __init__(
        self, target: PreTrainedModel, taps: Sequence[int], *, address: str, fingerprint: str, normed: bool = True
    ):
        super().__init__(target, taps, normed=normed)
        self.fingerprint, self._address = fingerprint, address.rstrip("/")
        found = describe_server(self._address)["fingerprint"]
        if found not in (None, fingerprint):
            raise ValueError(
                f"{address} serves another target than {self.name}: the fingerprint of its weights is {found}, here it "
                f"is {fingerprint}. Start `specdec serve-states {self.name}` there"
            )
        self.logits = self.logits.to(PartialState().device)  # weights from the disk are on the CPU

    def read(self, texts: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        bounds = packed(torch.tensor([len(text) for text in texts]), TOKENS).tolist()
        for start, end in pairwise(bounds):
            yield from enumerate(self._states(texts[start:end]), start)

    def _states(self, texts: Sequence[Tensor]) -> Sequence[Tensor]:
        """Request the states (T, C) of each text (T,)."""
        lengths = [len(text) for text in texts]
        request = {"fingerprint": self.fingerprint, "taps": self.taps, "texts": [text.tolist() for text in texts]}
        body = json.dumps(request).encode()
        states = _with_retries(self._address, lambda: load(_answer(f"{self._address}/states", body))["states"])
        wide = (len(self.taps) + 1) * self.logits.weight.shape[-1]
        if tuple(states.shape) != (sum(lengths), wide):
            raise ValueError(
                f"{self._address} gave states {tuple(states.shape)}, expected {(sum(lengths), wide)}: the inputs of "
                f"layers {self.taps} and the final states, concatenated. Check the server's version and target"
            )
        return states.split(lengths)


def describe_server(address: str) -> dict[str, Any]:
    """Return the server's description of its target: its name and fingerprint.

    Raises:
        ValueError: There is no server of states at this address.
    """
    found = _with_retries(address, lambda: json.loads(_answer(f"{address}/target")), tries=1)
    if not isinstance(found, dict) or "fingerprint" not in found:
        raise ValueError(
            f"{address} is not a server of states: it answers {str(found)[:80]!r} to /target. Give the address of "
            "`specdec serve-states`"
        )
    return found


def _answer(address: str, body: bytes | None = None) -> bytes:
    with urlopen(Request(address, body, {"Content-Type": "application/json"}), timeout=TIMEOUT) as answer:
        return answer.read()


def _with_retries(address: str, ask: Callable[[], Any], tries: int = TRIES) -> Any:
    """Return the result of `ask`, retrying if the connection drops or the server restarts."""
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
                    f"{address} gives no states ({reason}): check that `specdec serve-states TARGET` is running there. "
                    "Run the same command again to resume"
                ) from error
        time.sleep(RETRY_DELAY * 2 ** (tries - 1 - left))
    raise AssertionError("the last try returns or raises")
