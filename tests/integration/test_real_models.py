"""Heads beside real models. Needs their weights (`python -m examples.demo.weights NAME`), else skipped."""

import functools

import pytest
import torch

from examples.demo import weights
from examples.demo.loading import load
from specdec import DynamicTree, Eagle3Proposer, SpeculativeGenerator
from specdec.data.prompts import PROMPTS
from specdec.heads import registry
from tests.support import eagle3

NAMES = ["gemma-3-270m", weights.DRAFT, weights.TARGET]
ACCEPTED = {weights.DRAFT: 1.8, weights.TARGET: 1.6}  # tokens of a round over the demo's prompts: 1.72 of the second
pytestmark = [pytest.mark.slow, pytest.mark.model]


@functools.lru_cache(maxsize=1)
def real(name):
    path = weights.cached(name)
    if path is None:
        pytest.skip(f"needs `python -m examples.demo.weights {name}`")
    return load(str(path), "float32")


@functools.lru_cache(maxsize=1)
def plain(name, tokens):
    target, tokenizer = real(name)
    inputs = PROMPTS[0].encode(tokenizer)
    return inputs, target.generate(**inputs, do_sample=False, max_new_tokens=tokens)


@pytest.mark.parametrize("variant", eagle3.VARIANTS)
@pytest.mark.parametrize("name", ["gemma-3-270m", weights.DRAFT])
@torch.no_grad()
def test_random_heads_of_every_variant_change_nothing(name, variant):
    """Scaled embeddings and sliding windows (Gemma 3), grouped queries with biases (Qwen 2)."""
    target, _ = real(name)
    text = target.config.get_text_config()
    head = eagle3.head(
        variant,
        hidden_size=text.hidden_size,
        target_hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        draft_vocab_size=text.vocab_size if variant == "whole vocabulary" else 512,
        head_dim=32,
        tap_ids=(2, 5) if variant == "two taps" else None,
    )
    inputs, wanted = plain(name, 8)
    proposer = Eagle3Proposer(head, tree=DynamicTree(depth=3, top_k=3, size=10))
    spec = SpeculativeGenerator(target, proposer, draft_length=3, on_unsupported="error")
    assert torch.equal(spec.generate(**inputs, do_sample=False, max_new_tokens=8), wanted)
    assert spec.last_report.num_draft_tokens > 0


@pytest.mark.timeout(900)  # float32 on the 1.5B, on two cores
@pytest.mark.parametrize("name", NAMES)
def test_the_heads_we_ship(name):
    if not registry.at_hand(name, "eagle3"):
        pytest.skip(f"there is no head for {name}")
    target, tokenizer = real(name)
    spec = SpeculativeGenerator(target, "eagle3", on_unsupported="error")
    inputs, wanted = plain(name, 48)
    assert torch.equal(spec.generate(**inputs, do_sample=False, max_new_tokens=48), wanted)

    fixed = SpeculativeGenerator(target, "eagle3", draft_length=4, on_unsupported="error")
    for prompt in PROMPTS:
        fixed.generate(**prompt.encode(tokenizer), do_sample=False, repetition_penalty=1.0, max_new_tokens=48)
    assert fixed.report.mean_acceptance_length > ACCEPTED[name]
