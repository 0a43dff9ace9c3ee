"""N-grams where the text repeats itself, a model's drafts elsewhere."""

import pytest
import torch

from specdec import DraftModelProposer, Eagle3Proposer, HybridProposer, NgramProposer, SpeculativeGenerator
from specdec.pacing import Pacer
from tests import eagle3, tiny


class Remembering(Eagle3Proposer):
    """Keeps its drafts by where in the text they were made."""

    def begin(self, context):
        super().begin(context)
        self.drafts = {}

    def propose(self, context):
        draft = super().propose(context)
        for b in context.rows:
            self.drafts[b, context.ends[b]] = draft.tokens[b].tolist()
        return draft


class TakingTurns(HybridProposer):
    turn = 0

    def _lookup_pays(self, gains, context):
        self.turn += 1
        return self.turn % 2 == 0


@pytest.mark.parametrize("rows", [1, 2])
def test_the_head_keeps_up_while_n_grams_draft(rows):
    head, target, prompts = eagle3.trained()
    inputs = {"input_ids": prompts[:rows], "attention_mask": torch.ones_like(prompts[:rows])}
    alone, beside = (Remembering(head, branching=(1,)) for _ in range(2))
    outputs = [
        SpeculativeGenerator(target, proposer, draft_length=1, on_unsupported="error").generate(
            **inputs, do_sample=False, max_new_tokens=40
        )
        for proposer in (alone, TakingTurns(beside, NgramProposer(max_ngram=1)))
    ]
    assert outputs[0].tolist() == outputs[1].tolist()
    both = alone.drafts.keys() & beside.drafts.keys()
    assert len(both) > 2 * rows
    assert all(alone.drafts[place] == beside.drafts[place] for place in both)


def measured(tokens: float, draft_seconds: float) -> tuple[HybridProposer, Pacer]:
    """Target passes of 1 second and 0.02 per token. tokens: of the other's recent rounds, whose drafts took so long."""
    pacer = Pacer()
    for size in (1, 2, 4, 8):
        pacer.observe_round(size, 1, 1 + 0.02 * size, 1 + 0.02 * size, 2)
    hybrid = HybridProposer(tiny.Garbage())
    hybrid._rows, hybrid._tokens, hybrid._seconds = [0], tokens, draft_seconds + 1.1
    return hybrid, pacer


class Row:
    batch_size = 1

    def __init__(self, pacer):
        self.pacer = pacer


@pytest.mark.parametrize(
    ("tokens", "draft_seconds", "gains", "pays"),
    [
        (2.5, 0.5, [0.9, 0.8, 0.7, 0.6], True),  # 4 tokens for a pass, against 2.5 for a pass and a half
        (4.5, 0.5, [0.9, 0.1], False),
        (2.5, 0.5, [], False),  # nothing found
        (2.5, 0.5, [0.01], False),  # not worth its place in the pass
        (0.0, 0.0, [0.9, 0.8, 0.7, 0.6], False),  # the other has not been measured yet
    ],
)
def test_whoever_promises_more_tokens_per_second_drafts(tokens, draft_seconds, gains, pays):
    hybrid, pacer = measured(tokens, draft_seconds)
    assert hybrid._lookup_pays(gains, Row(pacer)) == pays


def test_both_draft_in_one_text():
    """A text that is copied from the prompt, by a model whose draft model is itself."""
    target = tiny.model("llama")
    spec = SpeculativeGenerator(target, HybridProposer(DraftModelProposer(target)), on_unsupported="error")
    drafted_by = []
    for proposer in (spec.proposer.other, spec.proposer.ngram):
        spied(proposer, drafted_by)
    inputs = tiny.prompts(30)
    out = spec.generate(**inputs, do_sample=False, max_new_tokens=200)
    assert out.tolist() == target.generate(**inputs, do_sample=False, max_new_tokens=200).tolist()
    assert {DraftModelProposer, NgramProposer} == set(drafted_by)


def spied(proposer, drafted_by):
    propose = proposer.propose

    def noted(context):
        drafted_by.append(type(proposer))
        return propose(context)

    proposer.propose = noted
