"""The warning that next to nothing was drafted or accepted: once per generator, with the reason, and never in vain."""

import pytest

from specdec import DraftModelProposer, Eagle3Proposer, HybridProposer, NgramProposer, Report, SpeculativeGenerator
from specdec.engine.draft_tally import ROUNDS, DraftTally, relative_size
from specdec.proposers.pacing.estimates import Estimates
from specdec.proposers.pacing.pacer import Pacer
from tests.support import eagle3, tiny

NAME = "DraftModelProposer"


@pytest.fixture(scope="module")
def proposer():
    made = DraftModelProposer(tiny.model("llama", seed=1))
    made.check(tiny.model("llama"))
    return made


def report(rounds, drafts=0, accepted=0, by=NAME, rows=1):
    """A call of so many rounds; the first ones have a draft, and of these the first ones one accepted token."""
    made = Report(num_calls=1, num_rows=rows)
    for i in range(rounds):
        drafted, taken = [2 * (i < drafts)] * rows, [int(i < accepted)] * rows
        made.record_round(drafted, drafted, taken, 0.1, by)
    return made


def costs(draft=0.1):
    """A target pass takes a second, a draft pass `draft`; None: none was ever run."""
    made = Estimates()
    made.verify.observe(1, 1.0)
    if draft is not None:
        made.draft.observe(draft)
    return made


def said(proposer, *reports, draft_length=None, draft=0.1, size=0.2):
    tally = DraftTally()
    for one in reports:
        tally.add(one, proposer)
    return tally.warning(costs(draft), size) if tally.idle(draft_length) else ""


def test_nothing_was_drafted_since_the_draft_is_as_slow_as_the_target(proposer):
    """As where a model drafts for itself: 23 rounds, and not a word."""
    found = said(proposer, report(23), draft=0.97)
    assert found.startswith("nothing was drafted in 23 rounds, so nothing is gained over plain decoding. ")
    assert "A pass of the draft takes 0.97 times as long as one of the target" in found
    assert "a smaller draft" in found
    assert "specdec doctor" in found


def test_nothing_was_drafted_since_the_draft_is_as_large_as_the_target(proposer):
    """Pacing did not try it once, so there is nothing but its size to go by."""
    assert "The draft has 1.00 times as many weights as the target" in said(proposer, report(23), draft=None, size=1.0)
    assert "To read the prompt with the draft is expected to cost more" in said(proposer, report(23), draft=None)
    assert "a pass of the draft takes 0.30 times as long as one of the target" in said(proposer, report(23), draft=0.3)


def test_the_size_of_a_draft(llama, draft, proposer):
    assert relative_size(proposer, llama) == pytest.approx(1.0, abs=0.05)
    smaller = DraftModelProposer(draft)
    smaller.check(llama)
    assert relative_size(HybridProposer(smaller), llama) < 0.9
    assert relative_size(NgramProposer(), llama) == 0


def test_a_trial_now_and_then_is_next_to_nothing(proposer):
    found = said(proposer, report(23, drafts=1, accepted=1), draft=0.97)
    assert found.startswith("1 draft in 23 rounds with 1 accepted tokens: next to nothing is gained")


@pytest.mark.parametrize("draft_length", [None, 4])
def test_nothing_was_ever_accepted(proposer, draft_length):
    found = said(proposer, report(30, drafts=30), draft_length=draft_length)
    assert found.startswith("30 drafts in 30 rounds with no accepted token: ")
    assert "The draft never agrees with the target" in found


@pytest.mark.parametrize(
    ("reports", "options"),
    [
        pytest.param([report(ROUNDS - 1)] * 9, {}, id="short calls"),
        pytest.param([report(40)], {"draft_length": 0}, id="a draft length of 0"),
        pytest.param([report(40, drafts=20, accepted=15)], {}, id="a draft that is good"),
        pytest.param([report(40, drafts=30, accepted=20), report(40)], {}, id="a text on which it was not"),
        pytest.param([report(40, rows=4)], {}, id="a batch, which pays less"),
        pytest.param([report(40, drafts=40, by="NgramProposer")], {}, id="n-grams that drafted all rounds"),
    ],
)
def test_where_there_is_nothing_to_say(proposer, reports, options):
    assert said(HybridProposer(proposer), *reports, **options) == ""


def test_beside_n_grams_it_says_whose_drafts_it_counts(proposer):
    found = said(HybridProposer(proposer), report(30, drafts=12, accepted=5, by="NgramProposer"), report(25))
    beside = "nothing was drafted in 43 rounds without a draft of NgramProposer"
    assert found.startswith(f"{beside}, so nothing is gained over NgramProposer alone. ")
    assert "n-grams" not in found  # they are in use


def test_a_head_is_not_advised_where_one_drafts():
    head = Eagle3Proposer(eagle3.head())
    head.check(tiny.model("llama"))
    found = said(head, report(25, by="Eagle3Proposer"))
    assert "a head trained for the target" not in found
    assert "specdec train --from HEAD" in found


def test_a_batch_whose_drafts_are_all_rejected(proposer):
    assert "no accepted token" in said(proposer, report(40, drafts=10, rows=4))


def test_lookups_that_find_nothing_are_ordinary():
    assert said(NgramProposer(), report(200)) == ""


def test_one_warning_per_generator(llama, proposer):
    spec = SpeculativeGenerator(llama, proposer, draft_length=2)
    with tiny.specdec_warnings() as messages:
        for length in (8, 64, 64):
            spec.generate(tiny.prompts(9)["input_ids"], do_sample=False, max_new_tokens=length)
    assert spec.report.num_accepted_tokens <= 0.02 * spec.report.num_row_rounds
    [message] = messages
    assert "drafts in" in message


@pytest.mark.parametrize(("draft_length", "count"), [(None, 1), (0, 0)])
def test_pacing_that_drafts_nothing(llama, proposer, monkeypatch, draft_length, count):
    monkeypatch.setattr(Pacer, "may_start", lambda *args, **kwargs: False)
    spec = SpeculativeGenerator(llama, proposer, draft_length=draft_length)
    with tiny.specdec_warnings() as messages:
        for _ in range(2):
            spec.generate(tiny.prompts(9)["input_ids"], do_sample=False, max_new_tokens=40)
    assert spec.report.num_drafts == 0
    assert [message.startswith("specdec: nothing was drafted in 39 rounds") for message in messages] == [True] * count
