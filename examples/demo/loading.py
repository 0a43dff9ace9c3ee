"""Loading of the demo's models in the fastest number format of this machine."""

from __future__ import annotations

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from examples.demo import weights
from specdec.models.hardware import best_device, number_format


def locate(name: str) -> str:
    """Return the path of one of the demo's own models, after fetching it if needed. Other names are unchanged."""
    return str(weights.fetch(name)) if name in weights.MODELS else name


def load(path: str, dtype: str = "auto") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model, in eval mode on the best available device, and its tokenizer."""
    device = best_device()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=number_format(dtype, device)).to(device).eval()
    return model, AutoTokenizer.from_pretrained(path)
