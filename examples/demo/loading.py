"""Loading the demo's model in the number format that this machine is fast in."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from examples.demo import weights
from specdec.models.hardware import best_device, number_format


def locate(name: str, cache_dir: str | Path | None = None) -> str:
    """What `from_pretrained` takes for `name`: one of the demo's own weights is fetched, anything else stays as is."""
    return str(weights.fetch(name, cache_dir)) if name in weights.MODELS else name


def load(path: str, dtype: str = "auto") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, in eval mode on the best device there is, and its tokenizer."""
    device = best_device()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=number_format(dtype, device)).to(device).eval()
    return model, AutoTokenizer.from_pretrained(path)
