"""Parts of the benchmark by name, the most valuable first, each with the seconds it may take."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.gpu.hazards import hazards
from benchmarks.gpu.limits import measure_machine
from benchmarks.gpu.parity import parity
from benchmarks.gpu.setting import Row, Setting
from benchmarks.gpu.speed import baseline, batches, draft_model, drafts, experts, long_prompts, rounds, second_shape
from benchmarks.gpu.throughput import regeneration

Part = Callable[[Setting], Iterator[Row]]

PARTS: dict[str, tuple[float, Part]] = {
    "machine": (30, measure_machine),
    "baseline": (90, baseline),
    "round": (60, rounds),
    "draft": (60, drafts),
    "long-prompts": (90, long_prompts),
    "batches": (75, batches),
    "draft-model": (60, draft_model),
    "experts": (60, experts),
    "qwen3-4b": (60, second_shape),
    "regeneration": (45, regeneration),
    "hazards": (60, hazards),
    "parity": (90, parity),
}
