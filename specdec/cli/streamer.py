"""`ColourStreamer`: prints text as it is generated, with accepted draft tokens in colour."""

from __future__ import annotations

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from specdec.evaluation.timing import Clock

ACCEPTED_STYLE = "green"
UNFINISHED = "\ufffd"  # replacement character, decoded from an incomplete character


def colour_note(console: Console) -> str:
    """Return a line of markup that explains the colour; empty if the console shows none, as in a pipe."""
    if not console.record and (not console.is_terminal or console.color_system is None or console.no_color):
        return ""
    return f"Accepted draft tokens are [{ACCEPTED_STYLE}]coloured[/]; the others are the model's own."


class ColourStreamer(Clock):
    """A streamer for `generate()` that prints text as it is generated, with accepted draft tokens in colour.

    specdec calls `on_accept` right before each `put`. Plain `generate()` does not, so its text has no colour.

    Args:
        tokenizer: tokenizer of the model.
        console: console to print to.

    Attributes:
        tokens: generated token ids.
        times: `time.perf_counter()` at each token.

    Example:
        ```python
        spec.generate(**inputs, streamer=ColourStreamer(tokenizer, Console(highlight=False)))
        ```
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, console: Console):
        super().__init__()
        self.tokens: list[int] = []
        self._tokenizer = tokenizer
        self._console = console
        self._accepted = False
        self._shown = 0  # number of tokens whose text is printed
        self._context = 0  # decoding starts here, before `_shown`: a token's text depends on the previous one
        self._pending_accepted: list[bool] = []  # for each token not printed yet
        self._column = 0  # column of the next character

    def on_accept(self, accepted: bool) -> None:
        """Set whether the next token passed to `put` is an accepted draft token."""
        self._accepted = accepted

    def show(self, tokens: torch.Tensor) -> None:
        """Print the text of generated tokens."""
        for token in tokens.reshape(-1).tolist():
            self.tokens.append(token)
            self._pending_accepted.append(self._accepted)
            text = self._pending_text()
            if text and not text.endswith(UNFINISHED):
                self._show(text)
        self._accepted = False

    def end(self) -> None:
        """Print the remaining text, including an incomplete character."""
        self._show(self._pending_text())
        self._console.out("", highlight=False)

    def _pending_text(self) -> str:
        before = self._tokenizer.decode(self.tokens[self._context : self._shown], skip_special_tokens=True)
        after = self._tokenizer.decode(self.tokens[self._context :], skip_special_tokens=True)
        return after[len(before) :]

    def _show(self, text: str) -> None:
        # A character of several tokens is coloured only if all of them were accepted.
        style = ACCEPTED_STYLE if self._pending_accepted and all(self._pending_accepted) else None
        self._console.out(self._wrapped(text), style=style, highlight=False, end="")
        self._console.file.flush()
        self._context, self._shown = self._shown, len(self.tokens)
        self._pending_accepted = []

    def _wrapped(self, text: str) -> str:
        """Insert line breaks where a terminal would wrap a line, since a recorded picture would cut it off."""
        if not self._console.record:
            return text
        folded = ""
        for character in text:
            self._column = 0 if character == "\n" else self._column + 1
            if self._column > self._console.width:
                folded, self._column = folded + "\n", 1
            folded += character
        return folded
