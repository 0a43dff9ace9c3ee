"""`Setting`: the device, the sizes and the models that the parts share."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.harness import counting
from benchmarks.harness.replay import Replay
from specdec import SpeculativeGenerator
from specdec.heads.eagle3.head import Eagle3Head
from specdec.proposers.base import Proposer

LLAMA, QWEN, MOE, HALF = "llama-8b", "qwen3-4b", "qwen3-30b-a3b, half its layers", "qwen2.5-0.5b"
LENGTHS = {0.6: 3, 0.8: 6, 0.9: 8}  # tokens to draft, by the share of them that is right
RIGHT = 0.8  # share of right draft tokens, where nothing else is said
AHEAD = 64  # tokens that a replayed text goes on after the last new one
Row = dict[str, Any]


@dataclass
class Setting:
    """Settings and models of a run. Models of one shape are kept, and freed before another shape is built.

    Attributes:
        device: device of the models.
        small: use tiny models and short texts.
        new_tokens: new tokens per measured call.
        out: folder for files besides the tables.
        end: `perf_counter()` at which the part that runs has to be done.
    """

    device: torch.device
    small: bool
    new_tokens: int
    out: Path
    end: float = float("inf")
    _shape: str = ""
    _models: dict[Any, Any] = field(default_factory=dict)

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def model(self, shape: str, **changes: Any) -> PreTrainedModel:
        """Return a counting model, see `counting.counting`."""
        if shape != self._shape:
            self.free()
            self._shape = shape
        key = tuple(sorted(changes.items()))
        if key not in self._models:
            self._models[key] = counting.counting(shape, self.device, self.small, **changes)
        return self._models[key]

    def draft_model(self, shape: str) -> PreTrainedModel:
        """Return a draft model of two layers, which is right after 80% of the tokens."""
        return self.model(shape, wrong=0.2, num_hidden_layers=2)

    def head(self, shape: str) -> Eagle3Head:
        """Return an EAGLE-3 head with random weights for a shape."""
        target = self.model(shape)
        if "head" not in self._models:
            self._models["head"] = counting.head_for(target)
        return self._models["head"]

    def free(self) -> None:
        """Free all models and the memory that torch keeps."""
        self._models, self._shape = {}, ""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def prompts(self, target: PreTrainedModel, rows: int = 1, length: int = 128) -> Tensor:
        """Return random prompts (rows, length) int64; with `small` a sixteenth as long."""
        length = max(4, length // 16) if self.small else length
        return counting.prompts(rows, length, target.config.vocab_size, self.device)

    def replay(
        self, target: PreTrainedModel, ids: Tensor, right: float = RIGHT, inner: Proposer | None = None, **given: Any
    ) -> SpeculativeGenerator:
        """Make a generator whose drafts are replayed, see `Replay`. given: its arguments."""
        vocab_size = target.config.vocab_size
        texts: Sequence[list[int]] = counting.counted(ids, self.new_tokens + AHEAD, vocab_size)
        given = {"draft_length": LENGTHS[right], "on_unsupported": "error"} | given
        return SpeculativeGenerator(target, Replay(texts, right, vocab_size, inner), **given)
