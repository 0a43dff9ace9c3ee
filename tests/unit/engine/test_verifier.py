"""Processors that nobody knows are called as plain decoding calls them, and still speculated on."""

import collections
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from specdec import (
    DraftModelProposer,
    DraftTree,
    DynamicTree,
    Eagle3Proposer,
    NgramProposer,
    RoundResult,
    SpeculativeGenerator,
)
from specdec.engine.verifier import _accept_padding
from tests.support import eagle3, tiny
from tests.support.fuzz import Counting

NEW = 20
PROPOSERS = {
    "ngram": lambda target: NgramProposer(),
    "ngram tree": lambda target: NgramProposer(continuations=3),
    "itself": lambda target: DraftModelProposer(target),
    "tree of itself": lambda target: DraftModelProposer(target, tree=DynamicTree(depth=3, top_k=3)),
    "head": lambda target: Eagle3Proposer(eagle3.head(tap_ids=(0, 1, 2))),
    "answer": lambda target: tiny.Garbage(answer=target.generate(**tiny.prompts(9), max_new_tokens=NEW)),
}


def closure():
    """A function that pushes down what it saw three calls ago."""
    seen = collections.deque(maxlen=3)

    def push_down(ids, scores):
        seen.append(int(ids[0, -1]))
        scores = scores.clone()
        scores[:, seen[0]] -= 20
        return scores

    return push_down


class Trigger(LogitsProcessor):
    """A state that changes only once a token was seen."""

    def __init__(self, token):
        self.token, self.open = token, False

    def __call__(self, ids, scores):
        self.open = self.open or int(ids[0, -1]) == self.token
        return scores.flip(-1) if self.open else scores


class ThinkingBudget(LogitsProcessor):
    """Ends the thought (token 7) after so many tokens of it, counted from token 5."""

    def __init__(self, budget=6):
        self.left = budget

    def __call__(self, ids, scores):
        self.left -= 1
        if self.left == 0:
            return torch.full_like(scores, float("-inf")).index_fill(1, torch.tensor([7], device=scores.device), 0.0)
        return scores


class Once(LogitsProcessor):
    """Fails when it is asked about a text twice, or about one that does not go on from the last."""

    def __init__(self):
        self.texts = []

    def __call__(self, ids, scores):
        text = ids[0].tolist()
        assert not self.texts or text[:-1] == self.texts[-1]
        self.texts.append(text)
        return scores


PROCESSORS = {
    "counts its calls": Counting,
    "closure": closure,
    "budget": ThinkingBudget,
    "each text once": Once,
    **{f"trigger {token}": lambda token=token: Trigger(token) for token in (3, 17, 40)},
}


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_as_plain_decoding(proposer, processor, sample):
    target, inputs = tiny.model("llama"), tiny.prompts(9)
    spec = SpeculativeGenerator(target, PROPOSERS[proposer](target), draft_length=4, on_unsupported="error")
    for seed in range(2):
        texts, calls = [], []
        for generate in (target.generate, spec.generate):
            made = PROCESSORS[processor]()
            torch.manual_seed(seed)
            arguments = {"do_sample": sample, "max_new_tokens": NEW, "logits_processor": LogitsProcessorList([made])}
            texts.append(generate(**inputs, **arguments).tolist())
            calls.append(getattr(made, "texts", None))
        assert texts[0] == texts[1]
        assert calls[0] == calls[1]


def test_it_takes_fewer_passes():
    target, inputs = tiny.model("llama"), tiny.prompts(9)
    spec = SpeculativeGenerator(target, DraftModelProposer(target), draft_length=4, on_unsupported="error")
    spec.generate(**inputs, do_sample=False, max_new_tokens=NEW, logits_processor=LogitsProcessorList([Once()]))
    assert spec.report.num_rounds <= NEW / 4


@pytest.mark.parametrize("proposer", ["itself", "tree of itself", "answer"])
def test_no_call_behind_a_stop(proposer):
    """A criterion of the caller's ends the text: processors are not asked about what would have followed."""
    target, inputs = tiny.model("llama"), tiny.prompts(9)
    spec = SpeculativeGenerator(target, PROPOSERS[proposer](target), draft_length=6, on_unsupported="error")

    def stops(ids, scores, **kwargs):
        return torch.full((len(ids),), ids.shape[1] >= 16)

    calls = []
    for generate in (target.generate, spec.generate):
        once = Once()
        generate(
            **inputs,
            do_sample=False,
            max_new_tokens=NEW,
            logits_processor=LogitsProcessorList([once]),
            stopping_criteria=[stops],
        )
        calls.append(once.texts)
    assert calls[0] == calls[1]


@pytest.mark.parametrize("end", range(2, 12))
def test_end_tokens_and_recorded_scores(end):
    target, inputs = tiny.model("llama"), tiny.prompts(9)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=NEW)
    spec = SpeculativeGenerator(target, DraftModelProposer(target), draft_length=5, on_unsupported="error")
    outputs = []
    for generate in (target.generate, spec.generate):
        outputs.append(
            generate(
                **inputs,
                do_sample=False,
                max_new_tokens=NEW,
                eos_token_id=int(plain[0, 9 + end]),
                logits_processor=LogitsProcessorList([Once()]),
                return_dict_in_generate=True,
                output_scores=True,
                output_logits=True,
                output_hidden_states=True,
            )
        )
    theirs, ours = outputs
    assert theirs.sequences.tolist() == ours.sequences.tolist()
    for name in ("scores", "logits"):
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-4, rtol=1e-4)
    assert len(ours.hidden_states) == len(theirs.hidden_states)


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
def test_classifier_free_guidance(sample):
    """It runs the target itself, with a cache of its own."""
    target, inputs = tiny.model("llama"), tiny.prompts(9)
    spec = SpeculativeGenerator(target, PROPOSERS["head"](target), draft_length=4, on_unsupported="error")
    texts = []
    for generate in (target.generate, spec.generate):
        torch.manual_seed(0)
        texts.append(generate(**inputs, do_sample=sample, max_new_tokens=NEW, guidance_scale=1.5).tolist())
    assert texts[0] == texts[1]


def test_a_batch_runs_as_plain_decoding_and_says_how_not_to():
    target, inputs = tiny.model("llama"), tiny.prompts(9, 6)
    spec = SpeculativeGenerator(target, "ngram", draft_length=4)
    with tiny.specdec_warnings() as messages:
        ours = spec.generate(**inputs, do_sample=False, max_new_tokens=NEW, logits_processor=[Counting()])
    assert (
        ours.tolist()
        == target.generate(**inputs, do_sample=False, max_new_tokens=NEW, logits_processor=[Counting()]).tolist()
    )
    assert len(messages) == 1
    assert "Counting may follow the text" in messages[0]
    assert "stateless` to True if its scores of a row depend on that row's text" in messages[0]


@pytest.mark.parametrize("rule", ["block", "token", "typical"])
def test_rules_over_all_nodes_leave_it_to_plain_decoding(rule):
    target, inputs = tiny.model("llama"), tiny.prompts(9)
    spec = SpeculativeGenerator(target, "ngram", rule=rule)
    with tiny.specdec_warnings() as messages:
        spec.generate(**inputs, do_sample=True, max_new_tokens=NEW, logits_processor=[Counting()])
    assert spec.report.num_plain_calls == 1
    assert "Counting" in messages[0]


def test_rows_still_wait_where_others_go_on_with_padding():
    """Else a row whose processor raises would get a token chosen from unprocessed scores."""
    draft = DraftTree.from_chain(torch.tensor([3, 4]), torch.tensor([[0, 0], [7, 8]]))
    result = RoundResult.of(draft, torch.arange(3).expand(2, 3), torch.tensor([0, 0]), torch.tensor([5, 6]))
    text = SimpleNamespace(padding=[True, False], budget=[9, 9], filler=0)
    padded = _accept_padding(replace(result, hold=12), text, None)
    assert padded.hold == 12
    assert padded.accepted.tolist() == [2, 0]
    assert padded.next_token.tolist() == [0, 6]
