"""Detection of a head's tap convention (how it counts the target's layers), by decoding with each convention."""

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
CLEARLY = 1.1  # ratio of accepted tokens from which two conventions count as different
SELDOM = 0.1  # accepted tokens per draft that any trained head of this model exceeds
TOKENS = 48


def probe_taps(head: Eagle3Head, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    """Measure the mean acceptance length with each tap convention; the right one is well ahead.

    Args:
        head: EAGLE-3 head that names its layers (`tap_ids`). Its config is restored afterwards.
        target: model that the head drafts for.
        tokenizer: the target's tokenizer.

    Returns:
        A sentence with the measured lengths and the conclusion.

    Raises:
        ValueError: The target has no such layers under any convention.
    """
    if head.config.version == 1 or head.config.tap_ids is None:
        return "nothing to probe: the head's config names no layers (`tap_ids`)"
    before, lengths = head.config, {}
    try:
        for convention in ("entering", "output"):
            head.config = replace(before, tap_convention=convention, tap_convention_known=True)
            try:
                spec = SpeculativeGenerator(target, Eagle3Proposer(head), draft_length=4, on_unsupported="error")
            except ValueError:  # no such layers under this convention
                continue
            for prompt in PROMPTS:
                inputs = Prompt("", prompt).encode(tokenizer, device_of(target))
                spec.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
            lengths[convention] = spec.report.mean_acceptance_length
    finally:
        head.config = before
    if not lengths:
        raise ValueError(
            "the head names layers that this target does not have, under any tap convention: choose the head's own "
            "target"
        )
    best = max(lengths, key=lambda convention: lengths[convention])
    measured = ", ".join(f"{convention} {length:.2f}" for convention, length in lengths.items())
    said = f"mean acceptance length by tap convention: {measured}"
    if lengths[best] < 1 + SELDOM:
        return f"{said}. Hardly any draft is accepted: this head belongs to another model, or was not trained."
    ranked = sorted(lengths.values())
    if len(ranked) > 1 and ranked[-1] - 1 <= CLEARLY * (ranked[-2] - 1):
        few = f"{len(PROMPTS)} texts of {TOKENS} tokens"
        return f"{said}. Too close to decide over {few}: the convention given above is kept."
    return f"{said}. {best!r} is right."
