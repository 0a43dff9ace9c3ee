"""A tiny target and heads that the registry lists for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from specdec.heads.registry import Known
from specdec.utils.download import Content, checksum, size_of
from tests.support import tiny


@contextmanager
def target() -> Iterator[PreTrainedModel]:
    """A tiny llama by a name that the registry reads as "tiny-llama"."""
    made = tiny.model("llama", num_hidden_layers=4)
    before = made.config._name_or_path
    made.config._name_or_path = "some-org/Tiny-Llama/"
    yield made
    made.config._name_or_path = before


def entry(folder: Path, **changes: Any) -> Known:
    """The registry's entry of the head in a folder, for that target."""
    files = {path.name: Content(checksum(path), size_of(path)) for path in sorted(folder.iterdir())}
    return Known("tiny-llama", folder.name, files=files, **changes)
