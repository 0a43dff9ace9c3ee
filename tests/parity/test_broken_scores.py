"""NaN and infinite scores: what plain decoding writes of them, or the very error that it raises."""

import copy

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation import LogitsProcessor

from specdec import DraftModelProposer, Lenient, NgramProposer, SpeculativeGenerator
from tests.support import tiny

PROPOSERS = {
    "ngram": lambda model: NgramProposer(),
    "chain": lambda model: DraftModelProposer(model),
    "tree": lambda model: DraftModelProposer(model, branching=(3, 2)),
}


class Breaks(LogitsProcessor):
    """From a length on, one token's score or all of them are `value`."""

    stateless = True

    def __init__(self, value, everywhere, start):
        self.value, self.everywhere, self.start = value, everywhere, start

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] < self.start:
            return scores
        scores = scores.clone()
        scores[:, slice(None) if self.everywhere else 7] = self.value
        return scores


def outcome(generate, arguments):
    torch.manual_seed(0)
    try:
        return generate(**arguments).tolist()
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("everywhere", [False, True], ids=["one token", "all"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_broken_scores(llama, proposer, value, everywhere, do_sample):
    spec = SpeculativeGenerator(llama, PROPOSERS[proposer](llama), draft_length=4)
    for start in (0, 13):
        breaks = LogitsProcessorList([Breaks(value, everywhere, start)])
        arguments = {**tiny.prompts(9, 4), "do_sample": do_sample, "max_new_tokens": 12, "logits_processor": breaks}
        expected = outcome(llama.generate, arguments)
        assert outcome(spec.generate, arguments) == expected
        if do_sample and (everywhere or value != float("-inf")):
            assert "either `inf`, `nan` or element < 0" in expected
    assert spec.report.num_plain_calls == 0


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_a_model_of_nan(llama, single, do_sample):
    model = copy.deepcopy(llama)
    with torch.no_grad():
        model.lm_head.weight[5] = float("nan")
    spec = SpeculativeGenerator(model, "ngram")
    arguments = {**single, "do_sample": do_sample, "max_new_tokens": 12}
    with tiny.specdec_warnings():
        assert outcome(spec.generate, arguments) == outcome(model.generate, arguments)


class KnownTokens(LogitsProcessor):
    """Drops the tokens that a tokenizer does not know."""

    stateless = True

    def __call__(self, input_ids, scores):
        return scores[:, :50]


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_fewer_scores_than_tokens(llama, proposer):
    """T > 0 draws as many random numbers as there are scores."""
    spec = SpeculativeGenerator(llama, PROPOSERS[proposer](llama), draft_length=4, on_unsupported="error")
    drops = LogitsProcessorList([KnownTokens()])
    for sampled in (False, True):
        arguments = {**tiny.prompts(9, 4), "do_sample": sampled, "max_new_tokens": 12, "logits_processor": drops}
        arguments |= {"return_dict_in_generate": True, "output_scores": True}
        torch.manual_seed(0)
        expected, state = llama.generate(**arguments), torch.get_rng_state()
        torch.manual_seed(0)
        output = spec.generate(**arguments)
        torch.testing.assert_close(output.sequences, expected.sequences)
        torch.testing.assert_close(output.scores, expected.scores)
        assert torch.equal(torch.get_rng_state(), state)


class KnownTokensAtFirst(LogitsProcessor):
    """Drops tokens in texts of an odd length, and in short ones."""

    stateless = True

    def __call__(self, input_ids, scores):
        length = input_ids.shape[1]
        return scores[:, :50] if length < 14 or length % 2 else scores


@pytest.mark.parametrize("lengths", [(9,), (9, 9), (9, 4)], ids=str)
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_fewer_scores_than_tokens_in_some_places(llama, proposer, lengths):
    """The rows of a batch are at different places, where plain decoding draws another number of random numbers."""
    spec = SpeculativeGenerator(llama, PROPOSERS[proposer](llama), draft_length=4, on_unsupported="error")
    arguments = {"max_new_tokens": 24, "logits_processor": [KnownTokensAtFirst()], "temperature": 2.0}
    arguments |= {"return_dict_in_generate": True, "output_scores": True, "pad_token_id": 0, "eos_token_id": None}
    for sampled in (False, True):
        for seed in range(4):
            inputs = tiny.prompts(*lengths)
            torch.manual_seed(seed)
            expected, state = llama.generate(**inputs, **arguments, do_sample=sampled), torch.get_rng_state()
            torch.manual_seed(seed)
            output = spec.generate(**inputs, **arguments, do_sample=sampled)
            assert torch.equal(output.sequences, expected.sequences)
            assert torch.equal(torch.get_rng_state(), state)
            for mine, its in zip(output.scores, expected.scores, strict=True):
                size = its.shape[1]  # more if the rows never were at this place together
                torch.testing.assert_close(mine[:, :size], its, atol=1e-4, rtol=0)
                assert mine[:, size:].eq(-torch.inf).all()


@pytest.mark.parametrize("rule", ["block", "token", "typical", Lenient()], ids=str)
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_fewer_scores_than_tokens_under_other_rules(llama, proposer, rule):
    spec = SpeculativeGenerator(llama, PROPOSERS[proposer](llama), rule=rule, on_unsupported="error")
    drops = LogitsProcessorList([KnownTokens()])
    prompt = tiny.prompts(9, 4)
    recorded = {"return_dict_in_generate": True, "output_scores": True}
    for seed in range(3):
        torch.manual_seed(seed)
        output = spec.generate(**prompt, **recorded, do_sample=True, max_new_tokens=12, logits_processor=drops)
        assert int(output.sequences[:, 9:].max()) < 50
        assert {scores.shape for scores in output.scores} == {(2, 50)}
