"""N-grams where the text repeats itself, a model's drafts elsewhere."""

import json
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from specdec import DraftTree, Eagle3Proposer, HybridProposer, NgramProposer, Proposer, SpeculativeGenerator
from specdec.proposers import hybrid
from specdec.proposers.context import Context
from specdec.proposers.hybrid import ProposerStats
from specdec.proposers.pacing.pacer import OUTLIER, Pacer
from tests.support import eagle3, tiny


class Remembering(Eagle3Proposer):
    """Keeps its drafts by where in the text they were made, those of all calls."""

    def __init__(self, head, **shape):
        super().__init__(head, **shape)
        self.drafts = {}

    def propose(self, context):
        draft = super().propose(context)
        for b in context.rows:
            self.drafts[b, context.ends[b]] = draft.tokens[b].tolist()
        return draft


@pytest.mark.parametrize("rows", [1, 2])
def test_the_head_keeps_up_while_n_grams_draft(rows):
    head, target, prompts = eagle3.trained(**eagle3.BRIEFLY)
    inputs = {"input_ids": prompts[:rows], "attention_mask": torch.ones_like(prompts[:rows])}
    alone, beside = (Remembering(head, branching=(1,)) for _ in range(2))
    outputs = [
        SpeculativeGenerator(target, proposer, draft_length=1, on_unsupported="error").generate(
            **inputs, do_sample=False, max_new_tokens=40
        )
        for proposer in (alone, tiny.TakingTurns(beside, NgramProposer(max_ngram=1)))
    ]
    assert outputs[0].tolist() == outputs[1].tolist()
    both = alone.drafts.keys() & beside.drafts.keys()
    assert len(both) > 2 * rows
    assert all(alone.drafts[place] == beside.drafts[place] for place in both)


def test_the_report_says_who_drafted():
    head, target, prompts = eagle3.trained(**eagle3.BRIEFLY)
    both = tiny.TakingTurns(Eagle3Proposer(head), NgramProposer(max_ngram=1))
    spec = SpeculativeGenerator(target, both, draft_length=2)  # not what this machine's costs decide
    for _ in range(2):
        spec.generate(prompts[:1], do_sample=False, max_new_tokens=40)
    report = spec.report
    assert set(report.num_drafts_by) == {"Eagle3Proposer", "NgramProposer"}
    assert all(report.num_drafts_by.values())
    assert sum(report.num_drafts_by.values()) == report.num_drafts
    assert sum(report.num_accepted_tokens_by.values()) == report.num_accepted_tokens
    assert "of it, by proposer" in report.details()
    assert json.loads(report.to_json())["num_drafts_by"] == dict(report.num_drafts_by)


def test_drafts_go_ahead_while_the_other_proposer_mostly_drafts_again():
    stats, likely = ProposerStats(Pacer().estimates), []
    for again in [True] * 30 + [False] * 3:
        stats.observe_turn(again)
        likely.append(stats.again >= hybrid.AGAIN)
    assert likely == [False] * 11 + [True] * 19 + [False] * 3


@pytest.mark.parametrize("looking_up", [False, True])
@pytest.mark.parametrize("again", [0.5, 0.95])
def test_only_the_other_proposers_round_starts_its_next_draft(looking_up, again):
    asked, pacer = [], Pacer()
    other = Silent()
    other.draft_ahead = lambda context, new_tokens: asked.append(context.pacer)
    proposer = HybridProposer(other)
    context = Context(torch.zeros(1, 1, dtype=torch.long), [0], [1], [True], [1], False, False, 8, pacer)
    proposer.begin(context)
    proposer.other, proposer._looking_up = other, looking_up
    proposer._stats_of(pacer).again = again
    proposer.draft_ahead(context, None)
    assert len(asked) == (again > 0.9 and not looking_up)
    assert pacer not in asked  # it has a pacer of its own


class Silent(Proposer):
    """Drafts nothing and notes what it is told."""

    def __init__(self):
        self.followed = self.observed = 0

    def propose(self, context):
        return DraftTree.root_only(context.root)

    def sync(self, context):
        self.followed += 1

    def observe(self, draft, result, accepted):
        self.observed += 1


@dataclass
class Batch:
    """What `HybridProposer` reads of a context: a second for a pass, 0.02 for a token in it."""

    rows: list[int]
    batch_size: int = 1
    budget: tuple[int, ...] = (64,)
    ends: tuple[int, ...] = (9,)
    pacer: Pacer = field(default_factory=Pacer)

    def __post_init__(self):
        for size in (*(1, 2, 3, 4, 6, 8) * 5, 1):
            self.pacer.observe_passes(size, 0.0, 1 + 0.02 * size)
            self.pacer.observe_round(size, 1, 2)
        self.pacer.estimates.budget.left = 0.0


def rounds(batch, *each):
    """Statistics of rounds with so many tokens and such costs."""
    found = ProposerStats(batch.pacer.estimates.apart())
    for tokens, cost in each:
        found.observe(tokens, cost)
    return found


@pytest.mark.parametrize(
    ("each", "gains", "pays"),
    [
        ([(2.5, 1.6)], [0.9, 0.8, 0.7, 0.6], True),  # 4 tokens for a pass, against 2.5 for a pass and a half
        ([(4.5, 1.6)], [0.9, 0.1], False),
        ([(2.5, 1.6)], [0.9, 0.3], True),
        ([(2.5, 1.6)], [], False),  # nothing found
        ([(2.5, 1.6)], [0.01], False),  # not worth its place in the pass
        ([], [0.9, 0.8, 0.7, 0.6], True),  # more than the other promises, as far as is known
        ([], [0.2], False),
    ],
)
def test_whoever_promises_more_tokens_per_second_drafts(each, gains, pays):
    batch, hybrid = Batch([0]), HybridProposer(Silent())
    hybrid._pacer, hybrid._reads_prompt = None, False
    assert hybrid._lookup_pays(gains, rounds(batch, *each), batch) == pays


def test_the_prompt_is_not_read_where_n_grams_do_nearly_as_well():
    """A rewritten text of 64 tokens after a prompt of 900: what the other's rounds win does not pay for reading it."""
    hybrid, gains = HybridProposer(Silent()), [0.9, 0.3]
    for prompt, left, pays in ((9, 64, False), (900, 64, True), (900, 4000, False)):
        batch = Batch([0], budget=(left,), ends=(prompt,))
        hybrid._pacer, hybrid._reads_prompt = None, True
        batch.pacer.observe_prefill(prompt, 0.08 * prompt)
        batch.pacer.observe_passes(1, 0.0, 1.0)
        assert hybrid._lookup_pays(gains, rounds(batch, (3.5, 1.6)), batch) == pays


def test_rows_that_are_finished_do_not_count():
    """Eight rows of which one goes on: as many tokens per row as before."""
    whole, rest = Batch(list(range(8)), 8), Batch([3], 8)
    hybrid = HybridProposer(Silent())
    for batch, accepted in ((whole, [2] * 8), (rest, [0, 0, 0, 2, 0, 0, 0, 0])):
        found = rounds(batch)
        batch.pacer.drafting = 0.5
        hybrid._book(found, batch, 4, accepted)
        assert found.tokens == 3
        assert found.cost == pytest.approx(0.5 + batch.pacer.verify(4))


def test_reading_the_prompt_and_interruptions_are_not_a_rounds_cost():
    batch, draft = Batch([0]), SimpleNamespace(size=4)
    hybrid = HybridProposer(Silent())
    found = hybrid._rounds[batch.pacer.estimates] = rounds(batch)
    hybrid._context, hybrid._reads_prompt = batch, True
    for cost in (100.0, 0.5, 100.0):
        batch.pacer.drafting = cost
        hybrid.observe(draft, None, [2])
    assert found.count == 2
    usual = 0.5 + batch.pacer.verify(4)
    assert found.cost == pytest.approx((usual + OUTLIER * usual) / 2)
    assert hybrid.other.observed == 3


@pytest.fixture
def clock(monkeypatch):
    """Costs as on a quiet machine: a second for a pass, 0.02 for each token of a draft."""
    observe_passes = Pacer.observe_passes

    def with_fixed_costs(self, size, drafting, verifying):
        observe_passes(self, size, 0.0, 1 + 0.02 * size * (size > 1))

    monkeypatch.setattr(Pacer, "observe_passes", with_fixed_costs)


@pytest.mark.usefixtures("clock")
def test_a_proposer_that_is_always_wrong_does_not_keep_n_grams_from_drafting():
    """It never leaves a round without a draft, by which alone costs can be told."""

    class Wrong(tiny.Garbage):
        followed = 0

        def sync(self, context):
            type(self).followed += 1

    spec = SpeculativeGenerator(tiny.model("llama"), HybridProposer(Wrong()), on_unsupported="error")
    spec.generate(**tiny.prompts(30), do_sample=False, max_new_tokens=200)
    assert Wrong.followed > 5
    assert spec.last_report.num_accepted_tokens > 0


def test_what_it_takes():
    with pytest.raises(TypeError, match="takes a Proposer"):
        HybridProposer("ngram")


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("draft_length", [None, 4])
def test_it_is_a_hybrid_at_fixed_lengths_too(draft_length):
    target, inputs = tiny.model("llama"), tiny.prompts(30)
    spec = SpeculativeGenerator(target, HybridProposer(Silent()), draft_length=draft_length, on_unsupported="error")
    out = spec.generate(**inputs, do_sample=False, max_new_tokens=200)
    assert out.tolist() == target.generate(**inputs, do_sample=False, max_new_tokens=200).tolist()
    assert spec.last_report.num_drafts_by["NgramProposer"] > 5
    assert spec.last_report.num_accepted_tokens > 0
