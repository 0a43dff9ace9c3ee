"""`SMALL_MODELS`: a small published model of each family, to draft for the others. `advice` names it."""

from __future__ import annotations

import re

# Pattern of the targets' names, and the hub id of a model with the same tokenizer. The first match counts.
SMALL_MODELS = {
    r"qwen2\.5-coder-.*": "Qwen/Qwen2.5-Coder-0.5B-Instruct",
    r"qwen2\.5-(?!vl|omni|1m).*": "Qwen/Qwen2.5-0.5B-Instruct",
    r"qwen3-(?!next|vl|omni|coder-next).*": "Qwen/Qwen3-0.6B",
    r"llama-3\.[123]-.*": "meta-llama/Llama-3.2-1B-Instruct",
    r"gemma-3-.*": "google/gemma-3-270m-it",
    r"smollm2-.*": "HuggingFaceTB/SmolLM2-135M-Instruct",
}


def small_model(name: str) -> str | None:
    """Return the hub id of a small model that can draft for a target of this name; None if none is known.

    Args:
        name: last part of the target's hub id, in lower case.

    Examples:
        >>> small_model("qwen3-32b")
        'Qwen/Qwen3-0.6B'
        >>> small_model("qwen3-0.6b"), small_model("gpt2")
        (None, None)
    """
    found = next((small for pattern, small in SMALL_MODELS.items() if re.fullmatch(pattern, name)), None)
    family = found and re.sub(r"-(it|instruct|chat|base)$", "", found.rpartition("/")[2].lower())
    return None if found is None or name.startswith(str(family)) else found


def advice(name: str) -> str:
    """Return what drafts more than n-grams for a target without a known head, in a clause."""
    small = small_model(name)
    draft = f'"ngram+draft:{small or "PATH_OR_ID"}" ({"a" if small else "with a"} small model of its family)'
    return f"{draft}, or a head of its own from `specdec train`"
