"""`ColourStreamer`: prints text as it is generated, accepted draft tokens in colour, and notes when each token came."""

from __future__ import annotations

import time

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

ACCEPTED_STYLE = "green"
UNFINISHED = "\ufffd"  # what a tokenizer decodes a part of a character to


class ColourStreamer(BaseStreamer):
    """A streamer for `generate()` that speculative decoding also tells where each token came from.

    specdec calls `on_accept` right before each `put`; plain `generate()` does not, and its text stays uncoloured.

    Attributes:
        tokens: the generated ones. times: `time.perf_counter()` at each.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, console: Console):
        self.tokens: list[int] = []
        self.times: list[float] = []
        self._tokenizer = tokenizer
        self._console = console
        self._prompt_seen = False
        self._accepted = False
        self._shown = 0  # tokens whose text is on the screen
        self._context = 0  # decoding starts here, a piece before `_shown`: a token's text depends on the one before it
        self._pending_accepted: list[bool] = []  # of the tokens not shown yet
        self._column = 0  # where the next character goes

    def on_accept(self, accepted: bool) -> None:
        """The next token to be put is (or is not) an accepted draft token."""
        self._accepted = accepted

    def put(self, value: torch.Tensor) -> None:
        """The prompt first, then the generated tokens; only these are shown."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        now = time.perf_counter()
        for token in value.reshape(-1).tolist():
            self.times.append(now)
            self.tokens.append(token)
            self._pending_accepted.append(self._accepted)
            self._show_complete()
        self._accepted = False

    def end(self) -> None:
        """Show what is left, an unfinished character too."""
        self._show(self._pending_text())
        self._console.out("", highlight=False)

    def _show_complete(self) -> None:
        text = self._pending_text()
        if text and not text.endswith(UNFINISHED):
            self._show(text)

    def _pending_text(self) -> str:
        before = self._tokenizer.decode(self.tokens[self._context : self._shown], skip_special_tokens=True)
        after = self._tokenizer.decode(self.tokens[self._context :], skip_special_tokens=True)
        return after[len(before) :]

    def _show(self, text: str) -> None:
        # A character made of several tokens counts as drafted only if all of them were.
        style = ACCEPTED_STYLE if self._pending_accepted and all(self._pending_accepted) else None
        self._console.out(self._folded(text), style=style, highlight=False, end="")
        self._console.file.flush()
        self._context, self._shown = self._shown, len(self.tokens)
        self._pending_accepted = []

    def _folded(self, text: str) -> str:
        """With a new line where a terminal folds a long one: a recorded picture would cut it."""
        if not self._console.record:
            return text
        folded = ""
        for character in text:
            self._column = 0 if character == "\n" else self._column + 1
            if self._column > self._console.width:
                folded, self._column = folded + "\n", 1
            folded += character
        return folded
