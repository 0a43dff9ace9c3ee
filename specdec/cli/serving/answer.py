"""`Answer`: one choice while it is generated. It sends the text on, and says when generation may stop."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from threading import Event
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import StoppingCriteria

from specdec.cli.serving.logprobs import LogprobRecorder, TokenLogprob
from specdec.cli.serving.text import StopStrings, TextDecoder


@dataclass(frozen=True)
class Delta:
    """A part of a choice: text, and the log probabilities of the tokens that begin in it."""

    index: int
    text: str
    logprobs: list[TokenLogprob]


@dataclass(frozen=True)
class Finish:
    """The end of a choice. num_tokens: the generated tokens, with the end token."""

    index: int
    reason: Literal["stop", "length"]
    num_tokens: int


class Answer(StoppingCriteria):
    """A stopping criterion that turns each new token of one row into text.

    Criteria are called once for each token, in order, as soon as a round has settled it. So generation stops at the
    token that completes a stop string, and in the round in which the request is cancelled.

    Args:
        index: number of the choice in the response.
        tokenizer: tokenizer of the model.
        stops: stop strings.
        ends: the model's end tokens. Their text is not part of the answer.
        recorder: keeps log probabilities; None if the request wants none.
        cancelled: set when nobody waits for the answer any more.
        models_stops: stop strings of the model's generation config, at which it ends. They are part of the answer.
        limit: most new tokens.
        before: token ids that the text continues; empty for a text of its own.
        send: called with each part of the answer.
        begun: called at the first token.
    """

    def __init__(
        self,
        index: int,
        tokenizer: Any,
        stops: Sequence[str],
        ends: Collection[int],
        recorder: LogprobRecorder | None,
        cancelled: Event,
        models_stops: Sequence[str],
        limit: int,
        before: Sequence[int],
        send: Callable[[Delta | Finish], None],
        begun: Callable[[], None],
    ):
        self.index, self._ends, self._recorder = index, ends, recorder
        self._decoder, self._stops = TextDecoder(tokenizer, before), StopStrings(stops)
        self._models_stops, self._limit = StopStrings(models_stops), limit
        self._cancelled, self._send, self._begun = cancelled, send, begun
        self._entries: list[TokenLogprob] = []  # not sent yet
        self._decoded = self._sent = 0  # characters
        self._num_tokens = 0
        self._ended = False

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        """Take the last token of input_ids (1, T), and return whether to stop, (1,) bool."""
        if self._num_tokens == 0:
            self._begun()
        stop = self._cancelled.is_set() or self._take(int(input_ids[0, -1]), input_ids.shape[1] - 1)
        return torch.tensor([stop], device=input_ids.device)

    def finish(self) -> None:
        """Send the rest of the text and the reason of its end."""
        if not self._stops.found:
            self._emit(self._stops.add(self._decoder.end()))
        if not self._stops.found:
            self._emit(self._stops.end(), last=True)
        # The model's own stop strings may be special tokens, which are not in the text.
        early = bool(self._models_stops) and self._num_tokens < self._limit
        whole = self._ended or self._stops.found or self._models_stops.found or early
        self._send(Finish(self.index, "stop" if whole else "length", self._num_tokens))

    def _take(self, token: int, length: int) -> bool:
        self._num_tokens += 1
        self._ended = token in self._ends
        if self._ended:
            return True  # transformers' own criterion stops here as well
        if self._recorder is not None:
            self._entries.append(self._recorder.take(length, token, self._decoded))
        text = self._decoder.add(token)
        self._decoded += len(text)
        self._models_stops.add(text)
        self._emit(self._stops.add(text))
        return self._stops.found

    def _emit(self, text: str, last: bool = False) -> None:
        self._sent += len(text)
        count = len(self._entries) if last else sum(entry.start < self._sent for entry in self._entries)
        ready, self._entries = self._entries[:count], self._entries[count:]
        if text or ready:
            self._send(Delta(self.index, text, ready))
