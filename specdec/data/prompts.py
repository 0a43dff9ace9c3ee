"""Three built-in prompts of different kinds, since the acceptance rate depends on the kind of text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from specdec.data.conversations import encode_prompt

LIGHTHOUSE = """\
The lighthouse at Gull Point was built in 1871 and had one keeper for every day of its working life. The keeper who \
stayed the longest was Martha Lind, who came with her father when she was nine and left when she was seventy. Each \
evening she climbed the hundred and twelve steps, cleaned the lens, filled the lamp and wrote one line in the log. \
Most lines say no more than the wind and the weather. But on the night of the great storm in 1903 she wrote that the \
sea had come up to the ninth step, that three boats had been seen from the gallery, and that all three were safe in \
the harbour by morning. When the light was made electric in 1938, she asked to switch it on herself. The log is kept \
in the town's library today, and visitors may turn its pages, provided that they have washed their hands."""


@dataclass(frozen=True)
class Prompt:
    """A named user message for a chat model."""

    name: str
    text: str

    def encode(self, tokenizer: PreTrainedTokenizerBase, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Tokenize the prompt as inputs of `generate()`, in the chat template if the tokenizer has one.

        Raises:
            ValueError: the tokenizer returns no tokens.
        """
        tokens = encode_prompt([{"role": "user", "content": self.text}], tokenizer)
        if not tokens:
            raise ValueError("the tokenizer returns no tokens for the prompt: use a longer prompt")
        ids = torch.tensor([tokens], device=device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


PROMPTS = (
    Prompt(
        "code",
        "Write a Python class `LRUCache` with `get` and `put`, both in constant time, without using OrderedDict or "
        "functools. Give the code with a short docstring for each method.",
    ),
    Prompt("explain", "Why does the sky look blue at noon but red at sunset? Explain it to a curious twelve-year-old."),
    Prompt(
        "rewrite",
        "Rewrite the following text in the present tense. Change nothing else and answer with the text only.\n\n"
        + LIGHTHOUSE,
    ),
)
