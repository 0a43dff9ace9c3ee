"""Model-made drafts where things get tight: the cache's end, rows without room, constraints, finished rows."""

import pytest
import torch

from specdec import DraftModelProposer, DynamicTree, Eagle3Proposer, NgramProposer, SpeculativeGenerator
from tests.support import eagle3, tiny

PROPOSERS = {
    "draft chain": lambda: DraftModelProposer(tiny.model("llama", seed=1)),
    "width one": lambda: DraftModelProposer(tiny.model("llama", seed=1), branching=(1, 1, 1)),
    "fixed tree": lambda: DraftModelProposer(tiny.model("llama", seed=1), branching=(3, 2, 1)),
    "dynamic tree": lambda: DraftModelProposer(tiny.model("llama", seed=1), tree=DynamicTree(4, 4, 14)),
    "n-gram tree": lambda: NgramProposer(continuations=3),
    "eagle3": lambda: Eagle3Proposer(eagle3.head(), tree=DynamicTree(4, 4, 14)),
    "eagle3 fixed": lambda: Eagle3Proposer(eagle3.head(), branching=(3, 2)),
}


@pytest.fixture(params=PROPOSERS)
def proposer(request):
    return PROPOSERS[request.param]()


@pytest.mark.parametrize("spare", [1, 2, 3, 5, 11])
def test_where_the_cache_grows(proposer, spare, monkeypatch):
    monkeypatch.setattr("specdec.models.cache.buffers.SPARE", spare)
    length = 14
    target, inputs = tiny.model("llama"), tiny.prompts(length, length - 5)
    arguments = {"do_sample": False, "max_new_tokens": 12, "return_dict_in_generate": True, "output_scores": True}
    plain = target.generate(**inputs, **arguments).sequences
    eos = int(plain[0, length + 2])  # the first row ends early and goes on with pads
    plain = target.generate(**inputs, **arguments, eos_token_id=eos).sequences
    spec = SpeculativeGenerator(target, proposer, draft_length=4, on_unsupported="error")
    assert spec.generate(**inputs, **arguments, eos_token_id=eos).sequences.tolist() == plain.tolist()


@pytest.mark.parametrize(
    "make", [lambda m: DraftModelProposer(m), lambda m: DraftModelProposer(m, branching=(2, 2, 2))]
)
def test_positions_end_where_the_table_does(make):
    """Rows of a learned position table with different room left: none is drafted beyond it."""
    target, draft = tiny.model("gpt2", n_positions=40), tiny.model("gpt2", seed=1, n_positions=40)
    inputs = tiny.prompts(30, 12)
    arguments = {"do_sample": False, "max_length": 40, "eos_token_id": 5}
    plain = target.generate(**inputs, **arguments)
    spec = SpeculativeGenerator(target, make(draft), draft_length=8, on_unsupported="error")
    assert spec.generate(**inputs, **arguments).tolist() == plain.tolist()


def test_texts_that_a_constraint_rules_out(proposer):
    """Nothing is allowed after texts that break the rule: plain decoding never asks about them."""
    target, inputs = tiny.model("llama"), tiny.prompts(9, 6)

    def allowed(row: int, text: torch.Tensor) -> list[int]:
        """Even and odd tokens in turn."""
        new = text[9:].tolist()
        legal = all(token % 2 == i % 2 for i, token in enumerate(new))
        return [t for t in range(2, tiny.VOCAB) if t % 2 == len(new) % 2] if legal else []

    arguments = {"do_sample": False, "max_new_tokens": 12, "prefix_allowed_tokens_fn": allowed}
    for length in (None, 4):
        spec = SpeculativeGenerator(target, proposer, draft_length=length, on_unsupported="error")
        plain = target.generate(**inputs, **arguments)
        assert spec.generate(**inputs, **arguments).tolist() == plain.tolist()


class OnlyRare:
    """Allows nothing that a draft vocabulary of 20 tokens holds."""

    stateless = True

    def __call__(self, ids, scores):
        return scores.masked_fill(torch.arange(scores.shape[-1], device=scores.device) < 30, float("-inf"))


@pytest.mark.parametrize(
    "make",
    [
        lambda target: DraftModelProposer(target, vocab=20),
        lambda target: DraftModelProposer(target, vocab=20, branching=(2, 2)),
        lambda target: DraftModelProposer(target, vocab=20, tree=DynamicTree(3, 3, 8)),
        lambda target: Eagle3Proposer(eagle3.head(draft_vocab_size=20, seed=0)),
    ],
    ids=["chain", "fixed tree", "dynamic tree", "eagle3"],
)
@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
def test_nothing_that_the_draft_knows_is_allowed(make, sample):
    target, inputs = tiny.model("llama"), tiny.prompts(9, 6)
    arguments = {"do_sample": sample, "max_new_tokens": 8, "logits_processor": [OnlyRare()]}
    proposer = make(target)
    if isinstance(proposer, Eagle3Proposer):
        proposer.head.d2t.zero_()  # tokens 0 to 19
    for length in (None, 3):
        spec = SpeculativeGenerator(target, proposer, draft_length=length, on_unsupported="error")
        out = spec.generate(**inputs, **arguments)
        assert bool((out[:, 9:] >= 30).all())
        if not sample:
            assert out.tolist() == target.generate(**inputs, **arguments).tolist()


def test_finished_rows_teach_pacing_nothing():
    """A row that goes on with pads (its scores are wanted) has no drafts, rejected or otherwise."""
    target, inputs = tiny.model("llama"), tiny.prompts(9, 6, 7)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=24)
    ends = [int(plain[0, 10]), int(plain[1, 11])]
    spec = SpeculativeGenerator(target, Eagle3Proposer(eagle3.head(), tree=DynamicTree(3, 3, 8)), draft_length=3)
    before = None
    for recorded in (False, True):
        spec.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=24,
            eos_token_id=ends,
            return_dict_in_generate=recorded,
            output_scores=recorded,
        )
        shared = next(iter(spec._sessions.own.estimates.values()))
        estimates = dict(shared.acceptance._rates), shared.expected_rate
        spec._sessions.own.estimates.clear()
        assert before in (None, estimates)
        before = estimates
