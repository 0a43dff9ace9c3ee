"""`PlainStreamer`: prints text as it is generated, and notes whether there is any."""

from __future__ import annotations

from typing import Any

from transformers import TextStreamer


class PlainStreamer(TextStreamer):
    """Prints the answer without the prompt and special tokens, and notes whether there is any text.

    Args:
        tokenizer: decodes the tokens.

    Attributes:
        has_text: True once more than spaces were printed.
    """

    def __init__(self, tokenizer: Any):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.has_text = False

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.has_text |= bool(text.strip())
        super().on_finalized_text(text, stream_end)
