"""`SpeculativeGenerator.options`: other settings for some calls, with everything that was prepared or learned."""

import pytest
import torch

from specdec import SpeculativeGenerator
from specdec.engine.draft_session import CallKind
from specdec.engine.lenient import Lenient
from tests.support import tiny

ARGUMENTS = {"max_new_tokens": 16, "do_sample": False}


@pytest.fixture
def spec(llama):
    return SpeculativeGenerator(llama, tiny.Garbage(size=5), draft_length=2)


def test_a_call_has_its_own_draft_length(spec, llama, ragged):
    expected = llama.generate(**ragged, **ARGUMENTS).tolist()
    for draft_length in (4, 0, 2):
        with spec.watch() as rounds:
            assert spec.options(draft_length=draft_length).generate(**ragged, **ARGUMENTS).tolist() == expected
        assert max(len(one.tokens) for one in rounds) - 1 == draft_length
    assert spec.draft_length == 2
    assert spec.report.num_calls == 3


def test_settings_that_are_not_named_stay(spec):
    other = spec.options(on_unsupported="error").options(draft_length=None)
    assert (other.draft_length, other.on_unsupported, other.rule) == (None, "error", "coupled")
    assert (spec.draft_length, spec.on_unsupported) == (2, "plain")
    assert other._sessions is spec._sessions
    assert other.report is spec.report


def test_a_rule_has_estimates_of_its_own(spec, single):
    sampling = ARGUMENTS | {"do_sample": True}
    for rule in ("coupled", "block", Lenient(gap=1.0)):
        torch.manual_seed(0)
        spec.options(rule=rule).generate(**single, **sampling)
        assert CallKind(1, sampling=True, rule=rule) in spec._sessions.own.estimates
    assert len({id(estimates) for estimates in spec._sessions.own.estimates.values()}) == 3


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"draft_length": -1}, ValueError, "draft_length must be None or an int of at least 0, got -1"),
        ({"rule": "blocks"}, ValueError, "rule"),
        ({"exact": True, "rule": "block"}, ValueError, 'exact=True needs rule="coupled"'),
        ({"compile": True}, TypeError, r"got compile: pass it to SpeculativeGenerator\(\.\.\.\)"),
        ({"drft_length": 1}, TypeError, "options.. takes draft_length, rule, on_unsupported, exact, got drft_length"),
    ],
)
def test_a_wrong_setting_is_an_error(spec, changed, error, message):
    with pytest.raises(error, match=message):
        spec.options(**changed)


def test_generate_names_the_place_for_single_calls(spec, single):
    with pytest.raises(TypeError, match=r"or for single calls to spec\.options\(draft_length=\.\.\.\)"):
        spec.generate(**single, draft_length=4)
    with pytest.raises(TypeError, match=r"not of generate\(\): pass it there$"):
        spec.generate(**single, compile=True)


def test_an_unsupported_call_is_an_error_where_this_call_asks_for_it(spec, single):
    spec.generate(**single, max_new_tokens=2, num_beams=2)
    with pytest.raises(ValueError, match="cannot speculate"):
        spec.options(on_unsupported="error").generate(**single, max_new_tokens=2, num_beams=2)


def test_installed_takes_the_options(spec, llama, single):
    with spec.options(draft_length=3).installed(), spec.watch() as rounds:
        llama.generate(**single, **ARGUMENTS)
    assert max(len(one.tokens) for one in rounds) == 4


def test_calls_that_draft_nothing_on_purpose_are_no_idle_ones(spec, single):
    for _ in range(3):
        spec.options(draft_length=0).generate(**single, max_new_tokens=40, min_new_tokens=40, do_sample=False)
    assert spec._sessions.own.tally.rounds == 0
