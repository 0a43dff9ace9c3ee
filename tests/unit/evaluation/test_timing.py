"""`time_call`: what a call wrote and when, for plain and speculative decoding alike."""

import pytest
import torch
from transformers.generation.streamers import BaseStreamer

from specdec import DraftModelProposer, NgramProposer, SpeculativeGenerator, SuffixProposer, TextMemory
from specdec.evaluation.methods import plain, speculative
from specdec.evaluation.timing import Call, Clock, Runs, Speed, pooled, take_turns, time_call, warm_up
from tests.support import encoded, tiny

NEW = 8


class Shown(Clock):
    def __init__(self):
        super().__init__()
        self.tokens = []

    def show(self, tokens):
        self.tokens += tokens.reshape(-1).tolist()


@pytest.mark.parametrize("rows", [1, 2])
def test_both_kinds_of_method_are_timed_alike(llama, rows):
    inputs = tiny.prompts(*([9] * rows))
    calls = []
    for method in (plain(llama), speculative("ngram", llama, NgramProposer())):
        streamer = Shown()
        calls.append(time_call(method, inputs, streamer, max_new_tokens=NEW, do_sample=False))
        assert isinstance(streamer, BaseStreamer)
        assert len(streamer.tokens) == len(calls[-1].times) == rows * NEW
        assert sorted(calls[-1].times) == calls[-1].times
        assert 0 < calls[-1].time_to_first_token <= calls[-1].times[-1] <= calls[-1].seconds
        assert streamer.tokens == torch.tensor(calls[-1].texts).T.reshape(-1).tolist()
    assert calls[0].texts == calls[1].texts
    assert calls[0].report is None
    assert calls[1].report.num_output_tokens == rows * NEW
    assert pooled(call.report for call in calls).num_calls == 1


def test_the_text_of_an_encoder_decoder_model_does_not_begin_with_its_prompt():
    model = encoded.model("t5")
    inputs = {"input_ids": encoded.inputs("t5")["input_ids"].repeat(1, 3)}  # a prompt longer than the text
    model.generation_config.eos_token_id = None
    calls = [
        time_call(method, inputs, max_new_tokens=NEW, do_sample=False)
        for method in (plain(model), speculative("ngram", model, NgramProposer()))
    ]
    assert calls[0].texts == calls[1].texts
    assert len(calls[0].texts[0]) == len(calls[0].times) == NEW


def test_the_code_of_a_method_names_its_settings(llama):
    method = speculative("n", llama, NgramProposer(), 4, "block", '"ngram"')
    assert method.code == 'SpeculativeGenerator(model, "ngram", draft_length=4, rule="block")'


def test_a_call_that_does_not_stream_has_no_first_token():
    silent, first = Call([[1, 2]], 2.0, []), Call([[1]], 1.0, [1.0])
    assert silent.time_to_first_token != silent.time_to_first_token
    assert Speed.of([first]) == Speed(1.0, 1.0, 1.0)


def test_a_draft_of_no_use_is_not_warned_of_while_it_is_measured(llama):
    """The results say it, once for all methods."""
    method = speculative("useless", llama, DraftModelProposer(tiny.model("llama", seed=1)), 2)
    run = Runs(method, llama.device, {"do_sample": False, "max_new_tokens": 40})
    with tiny.specdec_warnings() as messages:
        run.answer(tiny.prompts(9)["input_ids"][0])
    assert run.report.num_accepted_tokens == 0
    assert run.report.num_row_rounds > 20
    assert messages == []


def test_no_turn_and_no_method_drafts_from_another_ones_answers(llama):
    """Nor do measurements write to the memory that they were given."""
    memory = TextMemory()
    memory.write(memory.new(), [1, 2, 3])
    shared = SuffixProposer(memory)
    runs = [
        Runs(speculative(name, llama, shared, 4), llama.device, {"do_sample": False, "max_new_tokens": 12})
        for name in ("one", "other")
    ]
    prompt = tiny.prompts(9)["input_ids"][0]
    warm_up(runs, prompt, lambda: None)
    take_turns(runs, [prompt], lambda: None, repeats=2)
    drafted = [call.report.num_accepted_tokens for run in runs for call in run.calls]
    assert drafted == [drafted[0]] * 4
    assert list(memory.texts()) == [[1, 2, 3]]
    later = speculative("later", llama, runs[0].method.spec.proposer, 4)  # its proposer is one that has answered
    runs[0].method.start(0)
    assert len(list(later.memories._given.texts())) == len(list(runs[0].method.spec.proposer.memory.texts()))
    alone = SpeculativeGenerator(llama, shared, draft_length=4)
    for _ in range(2):
        alone.generate(prompt[None], do_sample=False, max_new_tokens=12)
    assert alone.report.num_accepted_tokens > 2 * drafted[0]  # a shared memory drafts the same answer
