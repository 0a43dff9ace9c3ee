"""How far to draft: costs learnt from passes, lengths chosen from them."""

import itertools
import sys
import threading

import pytest
import torch

from specdec.proposers.lookup.base import kind_of
from specdec.proposers.lookup.ngram import NgramProposer
from specdec.proposers.pacing.estimates import Acceptance
from specdec.proposers.pacing.pacer import Pacer
from specdec.proposers.pacing.pass_cost import PassCost
from tests.support import tiny

MS = 1e-3


def flat(tokens):
    """Verifying is nearly free: bfloat16."""
    return (100 + tokens) * MS


def jump(tokens):
    """Any draft doubles the pass: float32 on CPUs."""
    return (100 if tokens == 1 else 200 + tokens) * MS


def forbidding(tokens):
    """No draft is ever worth it."""
    return (100 if tokens == 1 else 140 * tokens) * MS


SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


def spend(pacer, size, verifying, drafting=0.0):
    """One round of one row: a token comes of it."""
    pacer.observe_passes(size, drafting, verifying)
    pacer.observe_round(size, 1, 1)


def taught(cost):
    """A pacer that begins a call; others saw passes of every size, of late without drafts, a token each. Nothing to
    spend on trials."""
    earlier = Pacer()
    for size in [*SIZES] * 30 + [1] * 50:
        spend(earlier, size, cost(size))
    pacer = Pacer(estimates=earlier.estimates)
    spend(pacer, 1, cost(1))
    pacer.estimates.budget.left = 0.0
    return pacer


@pytest.mark.parametrize("cost", [flat, jump])
def test_pass_costs_are_learnt(cost):
    verify = taught(cost).verify
    for size in SIZES:
        assert verify(size) == pytest.approx(cost(size) / cost(1), rel=0.03)


def test_costs_may_be_steps():
    verify = PassCost()
    for _ in range(9):
        for size, seconds in ((1, 1.0), (8, 1.0), (16, 2.0)):
            verify.observe(size, seconds)
    assert verify(8) == pytest.approx(1.0, rel=0.03)
    assert verify(16) == pytest.approx(2.0, rel=0.06)
    assert 1 < verify(12) < 2


def test_sizes_never_seen_are_like_their_neighbours():
    verify = PassCost()
    for size, seconds in ((1, 1.0), (2, 1.1)):
        verify.observe(size, seconds)
    assert 1.1 < verify(3) < verify(4) < verify(24) < 2
    verify.observe(1, 1.0)
    assert verify(64) > verify(48)  # and a node costs something


def test_a_slower_machine_has_the_same_costs():
    verify = taught(flat).verify
    before = verify(8)
    for _ in range(30):
        verify.observe(1, 5 * flat(1))
        verify.observe(8, 5 * flat(8))
    assert verify(8) == pytest.approx(before, rel=0.05)


def test_plain_passes_are_asked_for_less_and_less():
    """They are what all costs are compared with."""
    verify, plain = PassCost(), []
    for i in range(600):
        size = 1 if not verify.known or verify.needs_plain(1.0) else 8
        plain += [i] if size == 1 else []
        verify.observe(size, flat(size))
    gaps = [after - before for before, after in itertools.pairwise(plain)]
    assert gaps[:4] == sorted(gaps[:4])
    assert gaps[0] < 5
    assert gaps[-1] == 1 + 3**PassCost.CONFIRMED


def test_drafts_that_pay_much_need_fewer_plain_passes():
    verify = PassCost()
    for _ in range(4):
        verify.observe(1, flat(1))
        verify.observe(8, flat(8))
    verify.observe(1, flat(1))
    runs = []
    for speedup in (1.0, 4.0):
        verify.observe(1, flat(1))
        runs.append(0)
        while not verify.needs_plain(speedup):
            verify.observe(8, flat(8))
            runs[-1] += 1
    assert runs[1] > 3 * runs[0]


def test_one_slow_pass_counts_little():
    verify = PassCost()
    for _ in range(20):
        verify.observe(5, 0.1)
        verify.observe(1, 0.1)
    verify.observe(5, 9.0)
    verify.observe(1, 0.1)
    assert verify(6) < 1.1


def test_another_processs_costs_are_corrected_where_they_are_wrong():
    verify = PassCost({1: (1.0, 3), 8: (2.5, 3)})
    assert not verify.known
    verify.observe(1, 0.1)
    assert verify.known
    assert verify(8) == pytest.approx(2.5)
    for _ in range(30):
        verify.observe(8, 0.11)
        verify.observe(1, 0.1)
    assert verify(8) == pytest.approx(1.1, rel=0.06)


def test_another_processs_sizes_that_were_never_compared_are_learnt():
    verify = PassCost({1: (1.0, 0), 8: (1.5, 0)})
    for _ in range(3):
        verify.observe(1, 0.1)
        verify.observe(8, 0.25)
    assert verify(8) == pytest.approx(2.5)


def test_a_draft_that_is_sure_in_vain_is_found_out_whatever_it_says():
    acceptance = Acceptance()
    for confidence in (0.7, 0.8, 0.75, 0.85):
        acceptance.observe(confidence, False, prior=confidence)
    assert acceptance.rate(0.9, prior=0.9) < 0.4
    assert acceptance.rate("of another kind") == Acceptance.UNKNOWN


def test_it_sees_a_pass_without_a_draft_before_it_decides():
    pacer = Pacer()
    assert pacer.best_length([1.0] * 30, 1) == 0
    assert not pacer.may_start([1.0], draft_steps=1)
    spend(pacer, 1, 0.1)
    assert pacer.may_start([1.0], draft_steps=1)
    assert 0 < pacer.best_length([1.0] * 30, 1) < 8  # unknown costs are explored in small steps


@pytest.mark.parametrize(
    ("cost", "gains", "length"),
    [
        (flat, [0.9**d for d in range(1, 31)], 30),
        (flat, [0.5, 0.25, 0.125, 0.001], 3),
        (flat, [0.001], 0),
        (flat, [], 0),
        (jump, [0.5, 0.25, 0.125, 0.001], 0),  # 0.9 tokens more, for the price of one more pass
        (jump, [0.9**d for d in range(1, 31)], 30),
    ],
)
def test_best_length(cost, gains, length):
    assert taught(cost).best_length(gains, 1) == pytest.approx(length, abs=2 if length == 30 else 0)


def test_worth_weighs_draft_passes_and_the_jump():
    cheap, dear = taught(flat), taught(jump)
    for pacer, cost in ((cheap, flat), (dear, jump)):
        pacer.observe_draft_pass(40 * MS)
        spend(pacer, 1, cost(1))
        pacer.estimates.budget.left = 0.0
        for _ in range(40):
            pacer.observe_expectation(0.6)
    assert cheap.worth([0.6], 0, draft_steps=1)
    assert not cheap.worth([0.3], 0, draft_steps=1)
    assert cheap.worth([0.3], 1)
    assert not dear.worth([0.6], 0, draft_steps=1)
    assert dear.worth([0.3], 1)  # the jump is paid


def test_a_token_never_costs_more_than_plain_decoding_takes_for_it():
    """Drafts that fail make rounds dear; they must not make drafting look worth while."""
    pacer = taught(flat)
    for _ in range(20):
        pacer.observe_draft_pass(40 * MS)
        spend(pacer, 2, 100 * MS, 300 * MS)
        pacer.observe_expectation(0.3)
    pacer.estimates.budget.left = 0.0
    assert not pacer.worth([0.3], 0, draft_steps=1)


def read(pacer, seconds):
    """A prefill of 1000 tokens, and a round."""
    pacer.observe_prefill(1000, seconds)
    spend(pacer, 1, flat(1))


def test_a_long_text_is_read_only_if_that_pays():
    pacer = taught(flat)
    for _ in range(5):
        pacer.observe_draft_pass(20 * MS)
    pacer.observe_draft_pass(2.0, tokens=1000)  # 2 ms a token
    read(pacer, 8.0)
    assert pacer.may_start([0.8], 1, backlog=1000, tokens_left=200)
    assert not pacer.may_start([0.8], 1, backlog=1000, tokens_left=10)
    read(pacer, 0.1)  # a target that reads so fast has a draft that does
    assert pacer.may_start([0.8], 1, backlog=1000, tokens_left=10)


@pytest.mark.parametrize("length", [0, 1, 7])
def test_a_given_length_is_kept(length):
    pacer = Pacer(length)
    assert pacer.best_length([0.0] * 9, 1) == length
    assert [pacer.worth([0.0], d) for d in range(9)] == [d < length for d in range(9)]
    assert pacer.may_start([0.0], 1) == (length > 0)


def test_trials_take_a_share_of_the_seconds():
    """A draft that never brings anything, at half a pass: at most a 50th of a call goes into it, and it is not given
    up for ever."""
    estimates = taught(flat).estimates
    pacer, trials = Pacer(estimates=estimates), 0
    for _ in range(1000):
        if pacer.may_start([0.1], 1):
            trials += 1
            assert pacer.worth([0.1], 0)
            assert not pacer.worth([0.1], 1, draft_steps=1)
            pacer.observe_draft_pass(50 * MS)
            spend(pacer, 2, flat(2), 50 * MS)
        else:
            spend(pacer, 1, flat(1))
    assert 5 < trials < 0.02 * 1000 * flat(1) / (50 * MS)


def test_a_call_starts_anew_with_what_others_learnt():
    """Counts are the call's own, costs and acceptance are everybody's."""
    first = taught(flat)
    first.observe_draft_pass(40 * MS)
    spend(first, 2, flat(2), 40 * MS)
    second = Pacer(estimates=first.estimates)
    assert second.verify.known
    assert (second.passes.count, first.passes.count) == (0, 1)
    assert second.estimates.draft_step == pytest.approx(40 * MS / flat(1), rel=0.01)


def test_threads_share_what_they_learn():
    """Four at once, switching as often as Python can: no exception, and every estimate stays a sensible one."""
    estimates = taught(flat).estimates
    failures = []

    def call():
        pacer = Pacer(estimates=estimates)
        try:
            for i in range(300):
                size = 1 + 3 * (i % 2)
                pacer.observe_draft_pass(20 * MS)
                spend(pacer, size, flat(size))
                pacer.observe_confidence([i % 20, i % 7], 1)
                pacer.observe_expectation(0.5)
                pacer.may_start([0.5], 1)
                assert estimates.draft_step == pytest.approx(20 * MS / flat(1), rel=0.1)
                assert pacer.verify(4) == pytest.approx(flat(4) / flat(1), rel=0.1)
                assert pacer.plain_seconds == pytest.approx(flat(1), rel=0.1)
                assert 0.9 < estimates.cost_per_token < 1.5
        except Exception as error:  # in a thread it would be lost
            failures.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failures


def test_ngram_guesses_are_scored_though_never_drafted():
    """The text 1 2 3 1 2 3 ...: after the first lap every guess comes true."""
    pacer, proposer = taught(forbidding), NgramProposer()
    text = torch.tensor([[1, 2, 3] * 20])

    def context(end):
        return tiny.lone_row(text, end, pacer, budget=60 - end, vocab_size=9)

    proposer.begin(context(4))
    assert all(proposer.propose(context(end)).size == 1 for end in range(4, 50))
    long_matches = ("ngram", kind_of(17))
    assert pacer.acceptance.rate(long_matches) > 0.9
    before = pacer.acceptance.rate(long_matches)
    text[0, 49] = 7
    proposer.propose(context(50))
    assert pacer.acceptance.rate(long_matches) < before
