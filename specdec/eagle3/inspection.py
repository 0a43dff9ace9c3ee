"""What `specdec inspect` says: a checkpoint in words, and the tap convention measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from specdec.eagle3.checkpoint import Checkpoint
from specdec.eagle3.head import Eagle3Head
from specdec.runner import device_of

SURE = {"config": "its config says so", "weights": "its weights show it", "assumed": "ASSUMED"}
PROBE_PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number, and explain how it works.",
    "Explain in a few sentences why the sky is blue and sunsets are red.",
    "List five things to check before a long bicycle trip, each with a short reason.",
)
CLEARLY = 1.1  # times as many accepted tokens are a difference
SELDOM = 0.1  # accepted tokens a draft that any trained head of this model surpasses
PROBE_TOKENS = 48


def describe(checkpoint: Checkpoint) -> str:
    """Every key used, missing and unused, every field and how sure it is."""
    lines = [f"{checkpoint.path}: {checkpoint.format}", "", "fields"]
    width = max(len(field.name) for field in checkpoint.fields)
    for field in checkpoint.fields:
        note = f"; {field.note}" if field.note else ""
        lines.append(f"  {field.name:{width}}  {field.value}  ({SURE[field.source]}{note})")
    lines += ["", "tensors in use"]
    width = max(map(len, checkpoint.used))
    lines += [f"  {name:{width}}  {list(shape)}" for name, shape in sorted(checkpoint.used.items())]
    lines += ["", "tensors left out"] + [f"  {name}: {why}" for name, why in sorted(checkpoint.ignored.items())]
    if not checkpoint.ignored:
        lines.append("  none")
    missing = [] if checkpoint.config.own_embedding else ["embed_tokens.weight (the target's is used)"]
    if checkpoint.config.version == 1:
        missing.append("lm_head.weight (the target's is used)")
    return "\n".join([*lines, "", "not in the files", *(f"  {name}" for name in missing or ["nothing"])])


def probe_taps(head: Eagle3Head, target: PreTrainedModel, tokenizer: Any) -> str:
    """Measure the mean acceptance length for either way of counting layers; the right one is well ahead."""
    from specdec.demo.prompts import Prompt
    from specdec.generator import SpeculativeGenerator
    from specdec.proposers.eagle3 import Eagle3Proposer

    if head.config.version == 1 or head.config.tap_ids is None:
        return "nothing to probe: the head names no layers of its own"
    before, lengths = head.config, {}
    try:
        for convention in ("entering", "output"):
            head.config = replace(before, tap_convention=convention, tap_convention_known=True)
            try:
                spec = SpeculativeGenerator(target, Eagle3Proposer(head), draft_length=4, on_unsupported="error")
            except ValueError:  # no such layers, counted that way
                continue
            for prompt in PROBE_PROMPTS:
                inputs = Prompt("", prompt).encode(tokenizer, device_of(target))
                spec.generate(**inputs, max_new_tokens=PROBE_TOKENS, do_sample=False)
            lengths[convention] = spec.report.mean_acceptance_length
    finally:
        head.config = before
    if not lengths:
        raise ValueError("the head names layers that this target does not have, however they are counted")
    best = max(lengths, key=lambda convention: lengths[convention])
    measured = ", ".join(f"{convention} {length:.2f}" for convention, length in lengths.items())
    said = f"mean acceptance length by tap convention: {measured}"
    if lengths[best] < 1 + SELDOM:
        return f"{said}. Hardly a draft is accepted: this head is of another model, or was not trained."
    ranked = sorted(lengths.values())
    if len(ranked) > 1 and ranked[-1] - 1 <= CLEARLY * (ranked[-2] - 1):
        few = f"{len(PROBE_PROMPTS)} texts of {PROBE_TOKENS} tokens"
        return f"{said}. Too close to tell over {few}: what is said above stays."
    return f"{said}. {best!r} is right."
