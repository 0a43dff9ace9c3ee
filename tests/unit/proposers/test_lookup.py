"""What n-grams and suffixes have in common: they draft nothing that the target cannot write."""

import tracemalloc

import pytest
import torch

from specdec import NgramProposer, SpeculativeGenerator, SuffixProposer, TextMemory
from specdec.proposers.pacing.estimates import Estimates
from specdec.proposers.pacing.pacer import Pacer
from tests.support import tiny

LOOKUPS = {
    "ngram": lambda: NgramProposer(),
    "ngram tree": lambda: NgramProposer(continuations=3),
    "suffix": lambda: SuffixProposer(),
}


@pytest.mark.parametrize("draft_length", [None, 4])
@pytest.mark.parametrize("name", LOOKUPS)
def test_prompts_that_hold_more_tokens_than_have_logits(name, draft_length):
    """As Mllama's do, whose pictures' placeholder is embedded and never written."""
    target = tiny.on_host("llama")
    known = target.get_input_embeddings().weight.detach()
    placeholder = tiny.VOCAB + 4
    target.set_input_embeddings(torch.nn.Embedding.from_pretrained(torch.cat([known, known[:8] + 1])))
    target = target.to(tiny.DEVICE)
    spec = SpeculativeGenerator(target, LOOKUPS[name](), draft_length=draft_length, on_unsupported="error")
    for seed in range(3):
        inputs = tiny.prompts(14, 11, seed=seed)
        inputs["input_ids"][:, 5::3] = placeholder
        plain = target.generate(**inputs, do_sample=False, max_new_tokens=24)
        assert spec.generate(**inputs, do_sample=False, max_new_tokens=24).tolist() == plain.tolist()
    if draft_length:
        assert spec.report.num_draft_tokens > 0


def test_a_memory_shared_with_a_target_of_more_tokens():
    memory, inputs = TextMemory(), tiny.prompts(9, 4)
    arguments = {"do_sample": False, "max_new_tokens": 24}
    targets = [tiny.model("llama"), tiny.model("llama", seed=3, vocab_size=2 * tiny.VOCAB)]
    specs = [SpeculativeGenerator(target, SuffixProposer(memory), draft_length=4) for target in targets]
    for _ in range(2):
        for target, spec in zip(reversed(targets), reversed(specs), strict=True):
            assert spec.generate(**inputs, **arguments).tolist() == target.generate(**inputs, **arguments).tolist()
    assert max(max(text) for text in memory.texts()) >= tiny.VOCAB


@pytest.mark.parametrize("lookup", [NgramProposer, SuffixProposer])
def test_what_a_match_is_worth_by_its_length_before_anything_was_seen(lookup):
    """So that a copied passage is taken up at once, and a lucky token is not."""
    copied = list(range(1, 30))
    gains = [_expected(lookup(), text) for text in ([*copied, 40, *copied[:20]], [*copied, 40, *copied[:1]])]
    assert sum(gains[0][:8]) > 6
    assert sum(gains[1][:8]) < 1.5


def test_n_grams_go_on_from_the_longest_match_then_from_the_most_recent():
    passages = [[9, 1, 2, 3, 4], [8, 1, 2, 3, 5], [7, 1, 2, 3, 6]]
    text = [token for passage in passages for token in passage]
    for last, following in ((9, 4), (8, 5), (7, 6), (20, 6)):
        proposer = NgramProposer()
        _expected(proposer, [*text, last, 1, 2, 3])
        assert proposer.guesses[0].tokens[0] == following


def _expected(proposer, text):
    """What it expects of each token behind the text, where nothing was learnt."""
    context = tiny.lone_row(torch.tensor([text]), len(text), Pacer(None, Estimates()), budget=24, vocab_size=50)
    proposer.begin(context)
    return proposer.expect(context)


def test_room_for_millions_of_tokens_costs_nothing():
    """Who stops by time, or by what is written, may give no limit that means anything."""
    target, inputs = tiny.model("llama"), tiny.prompts(9, 4)
    arguments = {"do_sample": False, "max_new_tokens": 10**6, "stopping_criteria": [stop_at(40)]}
    spec = SpeculativeGenerator(target, NgramProposer())
    writes_plain_text_in_little_memory(spec, inputs | arguments)


@pytest.mark.parametrize("lookup", [NgramProposer, SuffixProposer])
def test_drafts_of_millions_of_tokens_cost_nothing(lookup):
    """No more is looked up than the row can take."""
    target, inputs = tiny.model("llama"), tiny.prompts(9, 4)
    arguments = {"do_sample": False, "max_new_tokens": 30}
    spec = SpeculativeGenerator(target, lookup(), draft_length=10**6)
    writes_plain_text_in_little_memory(spec, inputs | arguments)


def writes_plain_text_in_little_memory(spec, arguments):
    ours = spec.generate(**arguments)
    tracemalloc.start()
    spec.generate(**arguments)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 4 * 10**6  # bytes
    assert ours.tolist() == spec.model.generate(**arguments).tolist()


def stop_at(columns: int):
    def stop(ids, scores, **kwargs):
        return torch.full((len(ids),), ids.shape[1] >= columns, device=ids.device)

    return stop
