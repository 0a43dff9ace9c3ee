"""The report of calls: what is counted, also of those that failed or ran as plain decoding, and how it is shown."""

import threading

import pytest

from specdec import SpeculativeGenerator, Unsupported
from specdec.engine.report import LATENCIES, Report


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
    assert report._repr_html_().count("<tr>") == len(str(report).splitlines())


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
