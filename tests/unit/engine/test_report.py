"""The report of calls: what is counted, also of those that failed or ran as plain decoding, and how it is shown."""

import threading
from types import SimpleNamespace

import pytest
import torch
from transformers import StoppingCriteria

from specdec import SpeculativeGenerator, Unsupported
from specdec.engine.call_history import CallHistory
from specdec.engine.counts import LATENCIES
from specdec.engine.draft_session import CallKind
from specdec.engine.report import Report
from specdec.proposers.pacing.estimates import Estimates
from specdec.proposers.pacing.pacer import Pacer
from specdec.proposers.pacing.pass_cost import PassCost
from tests.support import tiny


def one_call(**counts):
    report = Report(num_calls=1, **counts)
    report.record_round([4, 2], [4, 2], [3, 0], seconds=0.5, drafted_by="ngram")
    return report


def test_reports_add_up():
    total = Report()
    for report in (one_call(), one_call(num_failed_calls=1), Report(num_calls=1)):
        total.add(report)
    assert (total.num_calls, total.num_failed_calls, total.num_plain_calls) == (3, 1, 0)
    assert total.num_drafts_by == {"ngram": 4}
    assert total.mean_acceptance_length == 1 + 6 / 4
    assert list(total.latencies) == [0.125] * 4 + [0.5] + [0.125] * 4 + [0.5]


def test_reasons_for_plain_decoding_are_counted_and_shown():
    total, plain = Report(), Report(num_calls=1)
    plain.record_plain("beam <search>")
    total.add(plain)
    total.add(plain)
    assert total.plain_reasons == {"beam <search>": 2}
    assert total.num_plain_calls == total.to_dict()["plain_reasons"]["beam <search>"] == 2
    assert "beam <search> (2)" in str(total)
    assert "beam &lt;search&gt; (2)" in total._repr_html_()


def test_reasons_that_differ_in_figures_are_counted_and_warned_of_once():
    history = CallHistory()
    with tiny.specdec_warnings() as warned:
        for length in (57, 80, 131):
            reason = f"the text may grow from {length} to 4096 tokens"
            with history.counted() as report:
                report.record_plain(reason)
                history.warn(reason)
    assert history.last.plain_reasons == {reason: 1}
    assert history.total.plain_reasons == {"the text may grow from 57 to 4096 tokens": 3}
    assert len(warned) == 1


def test_reasons_that_differ_in_more_than_figures_stay_apart():
    history = CallHistory()
    reasons = [
        "assistant_early_exit=7 of 2 layers",
        "assistant_early_exit=9 of 2 layers",
        "Stage1 keeps",
        "Stage2 keeps",
    ]
    with tiny.specdec_warnings() as warned:
        for reason in reasons:
            with history.counted() as report:
                report.record_plain(reason)
                history.warn(reason)
    assert history.total.plain_reasons == dict.fromkeys(reasons, 1)
    assert len(warned) == len(reasons)


def test_a_call_of_several_plain_loops_counts_once():
    """As Whisper's, with one loop for each segment."""
    history = CallHistory()
    with history.counted() as report:
        for length in (57, 80):
            with report.part() as part:
                part.record_plain(f"the text may grow from {length} to 4096 tokens")
    for counts in (history.last, history.total):
        assert counts.num_plain_calls == 1
        assert counts.plain_reasons == {"the text may grow from 57 to 4096 tokens": 1}


def test_a_plain_call_counts_no_padding_after_rows_that_a_criterion_ends(llama):
    class Third(StoppingCriteria):
        """Ends the first row at its third token."""

        def __call__(self, input_ids, scores, **kwargs):
            ended = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
            ended[0] = input_ids.shape[1] >= 9 + 3
            return ended

    spec = SpeculativeGenerator(llama, "ngram")
    arguments = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": 63, "pad_token_id": 0}
    counts = []
    for cached in (True, False):
        with tiny.specdec_warnings():
            spec.generate(**tiny.prompts(9, 4), **arguments, stopping_criteria=[Third()], use_cache=cached)
        counts.append(spec.last_report.num_output_tokens)
    assert spec.last_report.num_plain_calls == 1
    assert counts == [11, 11]


def test_a_plain_call_counts_padding_that_a_lone_row_writes_itself(llama):
    prompt = tiny.prompts(9)
    last = int(llama.generate(**prompt, do_sample=False, max_new_tokens=8, eos_token_id=None)[0, -1])
    spec = SpeculativeGenerator(llama, "ngram")
    end = next(token for token in range(64) if token != last)
    arguments = {"eos_token_id": end, "pad_token_id": last, "suppress_tokens": [end], "use_cache": False}
    with tiny.specdec_warnings():
        spec.generate(**prompt, do_sample=False, max_new_tokens=8, **arguments)
    assert (spec.last_report.num_plain_calls, spec.last_report.num_output_tokens) == (1, 8)


def test_a_plain_call_counts_no_padding_after_a_criterion_with_end_tokens(llama):
    class Ends(StoppingCriteria):
        """Ends the first row at once. Transformers pads what ends by criteria that name end tokens."""

        eos_token_id = torch.tensor([63])

        def __call__(self, input_ids, scores, **kwargs):
            return torch.arange(len(input_ids)) < 1

    spec = SpeculativeGenerator(llama, "ngram")
    arguments = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": None, "pad_token_id": 0}
    counts = []
    for cached in (True, False):
        with tiny.specdec_warnings():
            spec.generate(**tiny.prompts(9, 4), **arguments, stopping_criteria=[Ends()], use_cache=cached)
        counts.append(spec.last_report.num_output_tokens)
    assert counts == [9, 9]


def test_a_plain_call_counts_tokens_without_padding(llama):
    prompt = tiny.prompts(9, 4)
    whole = llama.generate(**prompt, do_sample=False, max_new_tokens=8)[:, prompt["input_ids"].shape[1] :]
    end = int(whole[0, 2])
    spec = SpeculativeGenerator(llama, "ngram")
    with pytest.warns(UserWarning, match="running as plain"):
        spec.generate(**prompt, do_sample=False, max_new_tokens=8, eos_token_id=end, pad_token_id=0, use_cache=False)
    expected = sum(row.index(end) + 1 if end in row else 8 for row in whole.tolist())
    assert spec.last_report.num_output_tokens == expected < 16


def test_calls_that_raised_are_shown():
    assert "calls that raised" not in str(one_call())
    [line] = [line for line in str(one_call(num_failed_calls=2)).splitlines() if line.startswith("calls that raised")]
    assert line.split() == ["calls", "that", "raised", "2"]


@pytest.mark.parametrize(
    "report", [Report(), one_call(), one_call(num_failed_calls=7654321, num_plain_calls=1234567, total_seconds=2.0)]
)
def test_a_report_is_shown_shortly_and_as_a_table(report):
    assert len(repr(report)) <= 120
    assert repr(report).startswith(f"<Report: {report.num_calls} calls")
    assert report._repr_html_().count("<tr>") == len(report.details().splitlines())


def test_a_report_is_read_in_ten_seconds():
    report = Report(num_calls=4, num_rows=4, num_output_tokens=96, total_seconds=4.8)
    report.times_to_first_token += [1.0] * 3
    for drafted, accepted in ([4], [3]), ([2], [0]), ([0], [0]):
        report.record_round(drafted, drafted, accepted, seconds=0.12)
    report.record_plain("beam search is not supported")
    report.seconds |= {"prefill": 1.0, "draft": 0.05, "verify": 0.3, "accept": 0.01}
    report.estimate_plain(6 * 0.09)
    assert str(report).splitlines() == [
        "speed-up         about 1.5x plain decoding, after the first token",
        "output tokens    96 in 4 calls, 20.0 per second, the first after 1.00 s",
        "tokens per pass  2.00, where plain decoding gets 1",
        "drafted tokens   50% accepted (3 of 6)",
        "time per token   60.0 ms: 83% passes of the model, 14% drafting, 3% other",
        "plain decoding   1 of 4 calls: beam search is not supported (1)",
    ]
    assert set(str(report).split()).isdisjoint({"nan", "-"})


def test_trees_and_batches_are_named_in_the_lines():
    report = Report(num_calls=1, num_rows=2)
    report.record_round([6, 6], [2, 2], [2, 1], seconds=0.1)
    assert "25% accepted (3 of 12, alternatives for the same place included)" in str(report)
    assert "2.50 for each row, where" in str(report)
    assert "drafted by" not in str(report)
    for name in ("NgramProposer", "Eagle3Proposer"):
        report.record_round([1], [1], [0], seconds=0.1, drafted_by=name)
    assert "included), drafted by Eagle3Proposer and NgramProposer" in str(report)


@pytest.mark.parametrize(
    "report",
    [Report(), Report(num_calls=1, num_rows=1, num_output_tokens=1), Report(num_calls=1, num_failed_calls=1)],
    ids=["no call", "one token", "raised"],
)
def test_what_was_not_measured_is_left_out(report):
    assert "nan" not in str(report)
    assert "speed-up" not in str(report)
    assert report.to_dict()["estimated_speed_up"] is None


def test_estimates_of_calls_are_pooled_and_others_left_out():
    total = Report()
    for plain_seconds, seconds in ((4.0, 2.0), (1.0, 1.0), (None, 50.0)):
        call = one_call()
        call.seconds["verify"] = seconds
        if plain_seconds is not None:
            call.estimate_plain(plain_seconds)
        total.add(call)
    assert total.estimated_speed_up == 5 / 3
    assert total.to_dict()["estimated_speed_up"] == 5 / 3
    assert dict(total.table())["estimated speed-up"] == "1.67"
    total.reset()
    assert total.estimated_speed_up != total.estimated_speed_up


@pytest.mark.parametrize("measured", [False, True])
def test_plain_decoding_is_estimated_where_its_passes_were_compared_with_others(llama, single, monkeypatch, measured):
    """Plain decoding needs a pass for each token after the first. Here every pass takes ten seconds."""
    observe = Pacer.observe_passes
    monkeypatch.setattr(Pacer, "observe_passes", lambda pacer, size, *seconds: observe(pacer, size, 0.0, 10.0))
    monkeypatch.setattr(PassCost, "FAMILIAR", 3 if measured else 1000)
    spec = SpeculativeGenerator(llama, "ngram")
    estimates = Estimates()
    for size in (1, 4) * 3:
        estimates.verify.observe(size, 10.0)
    spec._sessions.own.estimates[CallKind(1, sampling=False)] = estimates
    spec._sessions.own._kept[1, False] = SimpleNamespace(keep=lambda *costs: None)
    spec.generate(**single, max_new_tokens=12, do_sample=False)
    assert spec.last_report.estimated_plain_seconds == pytest.approx(11 * 10.0 if measured else 0, rel=0.05)
    assert (spec.last_report.compared_seconds == spec.last_report.round_seconds) == measured


def test_what_is_kept_is_bounded():
    report = Report()
    for _ in range(3):
        report.record_round([1], [1], [0], seconds=1.0)
        report.times_to_first_token.append(1.0)
    report.record_round([LATENCIES], [0], [LATENCIES], seconds=1.0)
    assert len(report.latencies) == LATENCIES
    assert 1.0 not in report.latencies
    report.times_to_first_token += [2.0] * LATENCIES
    report.add(report)
    assert len(report.latencies) == len(report.times_to_first_token) == LATENCIES


class Calls:
    """A streamer that calls `then` at the third of what it gets."""

    def __init__(self, then):
        self.then, self.count = then, 0

    def put(self, value):
        self.count += 1
        if self.count == 3:
            self.then()

    def end(self):
        pass


def broken():
    raise RuntimeError("the pipe is closed")


@pytest.mark.parametrize("plain", [False, True])
def test_a_call_that_raised_is_counted(llama, single, plain):
    spec = SpeculativeGenerator(llama, "ngram")
    with pytest.raises(RuntimeError, match="the pipe is closed"):
        spec.generate(**single, max_new_tokens=12, streamer=Calls(broken), use_cache=not plain)
    assert (spec.report.num_calls, spec.report.num_failed_calls, spec.last_report.num_failed_calls) == (1, 1, 1)
    assert spec.report.num_plain_calls == plain
    spec.generate(**single, max_new_tokens=12)
    assert (spec.report.num_calls, spec.report.num_failed_calls, spec.last_report.num_failed_calls) == (2, 1, 0)


def test_what_was_refused_is_counted_too(llama, single):
    spec = SpeculativeGenerator(llama, "ngram", on_unsupported="error")
    for unsupported in ({"num_beams": 2}, {"use_cache": False}):
        with pytest.raises(Unsupported):
            spec.generate(**single, max_new_tokens=4, **unsupported)
    with pytest.raises(ValueError, match="needs the tokenizer"):
        spec.generate(**single, max_new_tokens=4, stop_strings="a")
    assert (spec.report.num_calls, spec.report.num_failed_calls, spec.report.num_plain_calls) == (3, 3, 0)


@pytest.mark.parametrize("unsupported", [{"num_beams": 2}, {"use_cache": False}])
def test_the_last_report_says_why_a_call_ran_as_plain(llama, single, unsupported):
    spec = SpeculativeGenerator(llama, "ngram")
    with pytest.warns(UserWarning, match="running as plain") as said:
        spec.generate(**single, max_new_tokens=4, **unsupported)
    for _ in range(2):  # it is warned of once, and reported each time
        [(reason, count)] = spec.last_report.plain_reasons.items()
        assert count == 1
        assert str(said[0].message).endswith(reason)
        spec.generate(**single, max_new_tokens=4, **unsupported)
    assert spec.report.plain_reasons == {reason: 3}
    spec.generate(**single, max_new_tokens=4)
    assert spec.last_report.plain_reasons == {}


def test_the_last_report_is_of_the_call_that_finished_last(llama, single):
    spec, inner = SpeculativeGenerator(llama, "ngram"), []

    def nested():
        spec.generate(**single, max_new_tokens=2)
        inner.append(spec.last_report.num_output_tokens)

    spec.generate(**single, max_new_tokens=9, streamer=Calls(nested))
    assert (inner, spec.last_report.num_output_tokens) == ([2], 9)

    begun, other_is_done = threading.Event(), threading.Event()

    def wait():
        begun.set()
        assert other_is_done.wait(60)

    slow = threading.Thread(target=spec.generate, kwargs={**single, "max_new_tokens": 9, "streamer": Calls(wait)})
    slow.start()
    assert begun.wait(60)
    spec.generate(**single, max_new_tokens=3)
    assert spec.last_report.num_output_tokens == 3
    other_is_done.set()
    slow.join()
    assert spec.last_report.num_output_tokens == 9
    assert (spec.report.num_calls, spec.report.num_failed_calls) == (4, 0)


def test_a_generator_is_shown_shortly(llama, single):
    spec = SpeculativeGenerator(llama, "ngram")
    for _ in range(2):
        lines = repr(spec).splitlines()
        assert len(lines) <= 2
        assert max(map(len, lines)) <= 120
        assert lines[0] == "SpeculativeGenerator(LlamaForCausalLM, NgramProposer, draft_length=None, rule='coupled')"
        spec.generate(**single, max_new_tokens=4)
    assert lines[1].startswith("<Report: 1 calls, 4 tokens, ")


def test_an_answer_without_new_tokens_has_no_acceptance_rate():
    """A call of which nothing was kept once had a rate of 1.000."""
    empty = Report(num_calls=1, num_rows=1)
    empty.record_round([2], [2], [2], 0.1)
    assert empty.to_dict()["draft_acceptance_rate"] is None
    assert dict(empty.table())["draft acceptance rate"] == "-"
    empty.num_output_tokens = 3
    assert empty.draft_acceptance_rate == 1
