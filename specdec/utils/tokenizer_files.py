"""`load_tokenizer`: a model's tokenizer, or an error if its files are missing; `require_tokenizer` asks beforehand.

For most kinds of models transformers makes a tokenizer of a few special tokens, without a word, from a folder that
holds none. All texts would be empty or unknown tokens.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from specdec.utils.parsing import parsed, read_by_library

CONFIG = "tokenizer_config.json"
VOCABULARY = re.compile(
    r"(tokenizer|vocab|spiece|sentencepiece|tekken|bpe|source|dict).*|.*\.(model|tiktoken|spm|gguf)"
)
NO_VOCABULARY = ("ByT5", "Canine", "Perceiver")  # their tokens are bytes or characters
MERGES = "merges_file"  # of no use without the vocabulary


def require_tokenizer(source: str) -> None:
    """Raise ValueError if a folder holds a model but no vocabulary of a tokenizer. Imports nothing slow.

    Args:
        source: path or hub id. Nothing is said of hub ids.

    Raises:
        ValueError: files are missing; the message names them.
    """
    folder = Path(source)
    if not (folder / "config.json").is_file():
        return
    names = {path.name for path in folder.iterdir()}
    if any(VOCABULARY.fullmatch(name) for name in names - {CONFIG}):
        return
    settings = parsed((folder / CONFIG).read_bytes(), str(folder / CONFIG)) if CONFIG in names else {}
    made_here = str(settings.get("tokenizer_class", "")).startswith(NO_VOCABULARY) or "auto_map" in settings
    if not made_here:
        raise ValueError(_missing(source))


def load_tokenizer(source: str, **options: Any) -> Any:
    """Load a model's tokenizer.

    Args:
        source: path or hub id.
        options: arguments of `AutoTokenizer.from_pretrained`.

    Raises:
        OSError: there is no such folder or repository, or it cannot be reached.
        ValueError: files are missing, or damaged.
    """
    from transformers import AutoTokenizer

    require_tokenizer(source)
    with read_by_library(f"the tokenizer of {source}"):
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
    names = getattr(type(tokenizer), "vocab_files_names", None) or {}
    wanted = {"tokenizer.json", *(name for kind, name in names.items() if kind != MERGES)}
    if names and hasattr(tokenizer, "backend_tokenizer") and not any(_has(source, name) for name in wanted):
        raise ValueError(_missing(source))
    return tokenizer


def _has(source: str, name: str) -> bool:
    """Return whether a folder, or what was downloaded of a hub repository, holds a file."""
    from huggingface_hub import try_to_load_from_cache

    if Path(source).is_dir():
        return (Path(source) / name).is_file()
    return isinstance(try_to_load_from_cache(source, name), str)


def _missing(source: str) -> str:
    return (
        f"{source} holds no tokenizer: neither tokenizer.json nor tokenizer.model, vocab.json or vocab.txt. Copy the "
        f"tokenizer's files (tokenizer.json and {CONFIG}) from where the model comes from into it, or write them with "
        "tokenizer.save_pretrained()"
    )
