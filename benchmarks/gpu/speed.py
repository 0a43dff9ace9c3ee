"""Parts that measure speed: rounds, drafts, long prompts, batches, other shapes, and the baselines of the same run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.gpu.calls import measured
from benchmarks.gpu.kernels import kernel_rows
from benchmarks.gpu.setting import LENGTHS, LLAMA, MOE, QWEN, RIGHT, Row, Setting
from specdec import DraftModelProposer, DynamicTree, SpeculativeGenerator
from specdec.models.compat import ASSISTED_STATIC
from specdec.proposers.draft_heads.eagle3 import Eagle3Proposer

EAGER, STATIC = "generate(), eager", "generate(), static"
REPLAY = f"specdec replay, {RIGHT}"


def baseline(setting: Setting) -> Iterator[Row]:
    """Measure plain decoding, eager and with a static cache, whose passes transformers compiles on a GPU."""
    target = setting.model(LLAMA)
    ids = setting.prompts(target)
    yield eager(setting, LLAMA, target, ids)
    yield static(setting, LLAMA, target, ids)


def rounds(setting: Setting) -> Iterator[Row]:
    """Measure captured rounds with free drafts, and the kernels in them."""
    target = setting.model(LLAMA)
    ids = setting.prompts(target)
    spec = setting.replay(target, ids)
    yield (row := measured_shape(setting, LLAMA, REPLAY, spec, target, ids))
    yield from kernel_rows(setting, "replay", spec, ids, row["median round ms"])
    for right in (other for other in LENGTHS if other != RIGHT):
        spec = setting.replay(target, ids, right)
        yield measured_shape(setting, LLAMA, f"specdec replay, {right}", spec, target, ids)
    spec = setting.replay(target, ids, compile=False)
    yield measured_shape(setting, LLAMA, f"{REPLAY}, compile=False", spec, target, ids, calls=1)


def drafts(setting: Setting) -> Iterator[Row]:
    """Measure captured rounds of an EAGLE-3 head that drafts ahead: a chain, and a dynamic tree of 60 nodes."""
    target, head = setting.model(LLAMA), setting.head(LLAMA)
    ids = setting.prompts(target)
    shapes = {
        "chain": (Eagle3Proposer(head).shaped(), LENGTHS[RIGHT]),
        "tree of 60": (Eagle3Proposer(head, tree=DynamicTree(depth=8, top_k=8, size=60)), 8),
    }
    for name, (proposer, depth) in shapes.items():
        spec = setting.replay(target, ids, inner=proposer, draft_length=depth)
        row = measured_shape(setting, LLAMA, f"specdec EAGLE-3 {name}, {RIGHT}", spec, target, ids)
        yield row
        yield from kernel_rows(setting, f"EAGLE-3 {name}", spec, ids, row["median round ms"])


def long_prompts(setting: Setting) -> Iterator[Row]:
    """Measure captured rounds after long prompts."""
    target = setting.model(LLAMA)
    for length in (2000, 8000, 32000):
        ids = setting.prompts(target, length=length)
        spec = setting.replay(target, ids)
        yield (row := measured_shape(setting, LLAMA, REPLAY, spec, target, ids, calls=2))
        if length == 8000:
            yield from kernel_rows(setting, "replay after 8000", spec, ids, row["median round ms"])
        del spec
        if setting.cuda:
            torch.cuda.empty_cache()


def batches(setting: Setting) -> Iterator[Row]:
    """Measure batches, against eager plain decoding."""
    target = setting.model(LLAMA)
    for rows in (2, 4) if setting.small else (4, 16, 64):
        ids = setting.prompts(target, rows)
        yield measured_shape(setting, LLAMA, REPLAY, setting.replay(target, ids), target, ids, calls=2)
        yield eager(setting, LLAMA, target, ids, calls=1)


def draft_model(setting: Setting) -> Iterator[Row]:
    """Measure a draft model of two layers, and transformers' assisted generation with it."""
    target, draft = setting.model(LLAMA), setting.draft_model(LLAMA)
    ids, length = setting.prompts(target), LENGTHS[RIGHT]
    spec = SpeculativeGenerator(target, DraftModelProposer(draft), draft_length=length, on_unsupported="error")
    row = measured_shape(setting, LLAMA, f"specdec draft model, {RIGHT}", spec, target, ids)
    yield row
    yield from kernel_rows(setting, "draft model", spec, ids, row["median round ms"])
    yield measured_shape(setting, LLAMA, f"assisted, {RIGHT}", assisted(target, draft, False), target, ids, calls=2)
    name = f"assisted, static, {RIGHT}"
    if ASSISTED_STATIC:
        yield measured_shape(setting, LLAMA, name, assisted(target, draft, True), target, ids, calls=2)
    else:
        yield {"method": name, "note": "needs transformers 5.24"}


def experts(setting: Setting) -> Iterator[Row]:
    """Measure a mixture of experts."""
    target = setting.model(MOE)
    ids = setting.prompts(target)
    yield measured_shape(setting, MOE, REPLAY, setting.replay(target, ids), target, ids)
    yield eager(setting, MOE, target, ids, calls=1)


def second_shape(setting: Setting) -> Iterator[Row]:
    """Measure a second shape at two lengths."""
    target = setting.model(QWEN)
    for length in (128, 2048):
        ids = setting.prompts(target, length=length)
        yield measured_shape(setting, QWEN, REPLAY, setting.replay(target, ids), target, ids)
        yield eager(setting, QWEN, target, ids, calls=1)


def eager(setting: Setting, shape: str, target: PreTrainedModel, ids: Tensor, **given: Any) -> Row:
    """Measure plain decoding as it is by default."""
    return measured_shape(setting, shape, EAGER, target.generate, target, ids, **given)


def static(setting: Setting, shape: str, target: PreTrainedModel, ids: Tensor) -> Row:
    """Measure plain decoding with a static cache, and free what transformers keeps for it."""

    def generate(ids: Tensor, **given: Any) -> Tensor:
        return target.generate(ids, cache_implementation="static", **given)

    try:
        return measured_shape(setting, shape, STATIC, generate, target, ids)
    finally:
        for name in ("_cache", "_compiled_call"):
            target.__dict__.pop(name, None)
        torch.compiler.reset()


def measured_shape(setting: Setting, shape: str, name: str, method: Any, *given: Any, **more: Any) -> Row:
    """Measure as `measured` does, with the shape's name and the passes of plain decoding."""
    row = measured(setting, name, method, *given, **more)
    if name in (EAGER, STATIC):
        row["tokens a pass"] = 1.0
    return {"model": shape, **row}


def assisted(target: PreTrainedModel, draft: PreTrainedModel, static: bool) -> Any:
    """Make the method of transformers' assisted generation, also with a static cache (since 5.24)."""
    from benchmarks.harness.methods import assisted as in_assisted

    generate = in_assisted(target, draft, LENGTHS[RIGHT], static)

    def method(ids: Tensor, **given: Any) -> Tensor:
        return generate(input_ids=ids, **given)

    return method
