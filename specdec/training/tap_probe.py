"""`probe_taps`: which way of counting a target's layers a head means, measured by decoding with either."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec.data.prompts import Prompt
from specdec.engine.generator import SpeculativeGenerator
from specdec.heads.eagle3.head import Eagle3Head
from specdec.models.introspection import device_of
from specdec.proposers.draft_heads.eagle3 import Eagle3Proposer

PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number, and explain how it works.",
    "Explain in a few sentences why the sky is blue and sunsets are red.",
    "List five things to check before a long bicycle trip, each with a short reason.",
)
CLEARLY = 1.1  # times as many accepted tokens are a difference
SELDOM = 0.1  # accepted tokens a draft that any trained head of this model surpasses
TOKENS = 48


def probe_taps(head: Eagle3Head, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    """Measure the mean acceptance length for either way of counting layers; the right one is well ahead."""
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
            for prompt in PROMPTS:
                inputs = Prompt("", prompt).encode(tokenizer, device_of(target))
                spec.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
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
        few = f"{len(PROMPTS)} texts of {TOKENS} tokens"
        return f"{said}. Too close to tell over {few}: what is said above stays."
    return f"{said}. {best!r} is right."
