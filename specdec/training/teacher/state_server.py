"""HTTP server of a target's states, for training on other machines. The protocol is in docs/training.md.

Anyone who can reach its port can use the target, so by default the command line lets it listen on this machine only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedModel

from specdec.data.conversations import context_of
from specdec.models.hidden_states import FINAL
from specdec.training.teacher.base import fingerprint
from specdec.training.teacher.state_extractor import Reader

MOST_BYTES = 2**26  # maximum size of a request


class StatesServer(ThreadingHTTPServer):
    """HTTP server of one target's states. `serve_forever` starts it; requests are computed one at a time."""

    daemon_threads = True

    def __init__(self, target: PreTrainedModel, address: tuple[str, int]):
        self.target, self._lock = target, Lock()
        self._readers: dict[tuple[int, ...], Reader] = {}
        super().__init__(address, Handler)

    @cached_property
    def description(self) -> dict[str, Any]:
        return {"name": self.target.name_or_path, "fingerprint": fingerprint(self.target)}

    def states(self, taps: Sequence[int], texts: Sequence[Tensor]) -> Tensor:
        """Compute the states of texts: the inputs of some layers, then the final states.

        Args:
            taps: layers, as `Taps` counts.
            texts: token ids, (T,) int64 each.

        Returns:
            (N, C), the states of all texts, concatenated.

        Raises:
            ValueError: There is no such layer, or a text is too long or has tokens outside the vocabulary.
        """
        text = self.target.config.get_text_config(decoder=True)
        context = context_of(self.target.config)
        for ids in texts:
            if not 0 < len(ids) <= context or int(ids.min()) < 0 or int(ids.max()) >= text.vocab_size:
                raise ValueError(f"a text must have 1 to {context} tokens, each from 0 to {text.vocab_size - 1}")
        with self._lock:
            reader = self._readers.get(tuple(taps)) or Reader(self.target, [*taps, FINAL])
            self._readers[tuple(taps)] = reader
            found = dict(reader.read(texts))
        return torch.cat([found[i].cpu() for i in range(len(texts))])


class Handler(BaseHTTPRequestHandler):
    """Handler of one request."""

    server: StatesServer

    def do_GET(self) -> None:
        if self.path == "/target":
            self._answer(200, json.dumps(self.server.description).encode(), "application/json")
        else:
            self._answer(404, b"unknown path: GET /target, or POST to /states")

    def do_POST(self) -> None:
        try:
            states = self.server.states(*self._parse_request())
        except ValueError as error:
            self._answer(400, str(error).encode())
        except (RuntimeError, MemoryError) as error:
            self._answer(500, str(error).encode())
        else:
            self._answer(200, save({"states": states}), "application/octet-stream")

    def _parse_request(self) -> tuple[list[int], list[Tensor]]:
        """Parse the request's taps and texts."""
        size = int(self.headers.get("Content-Length") or 0)
        if self.path != "/states" or size > MOST_BYTES:
            raise ValueError(f"POST to /states, {MOST_BYTES} bytes at most")
        request = json.loads(self.rfile.read(size))
        mine = self.server.description
        try:
            texts = [torch.tensor([int(token) for token in text]) for text in request["texts"]]
            taps = [int(tap) for tap in request["taps"]]
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError('expected {"taps": [1, 2], "texts": [[5, 6, 7]]}') from error
        if request.get("fingerprint") not in (None, mine["fingerprint"]):
            raise ValueError(
                f"the request is for another target than {mine['name']}, whose fingerprint is {mine['fingerprint']}"
            )
        if not texts:
            raise ValueError("no texts: give at least one")
        return taps, texts

    def _answer(self, status: int, content: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_request(self, code: Any = "-", size: Any = "-") -> None:
        """Log failed requests only."""
        if int(code) >= 400:
            super().log_request(code, size)
