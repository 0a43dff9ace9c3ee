"""How far to draft: costs learnt from passes, lengths chosen from them."""

import sys
import threading

import pytest
import torch

from specdec.pacing import FIRST_LENGTH, Pacer, PassCost
from specdec.proposers.base import Context
from specdec.proposers.ngram import NgramProposer

MS = 1e-3


def flat(tokens):
    """Verifying is nearly free: bfloat16."""
    return (100 + tokens) * MS


def jump(tokens):
    """Any draft doubles the pass: float32 on CPUs."""
    return (100 if tokens == 1 else 200 + tokens) * MS


def forbidding(tokens):
    """No draft is ever worth it."""
    return (100 if tokens == 1 else 9000) * MS


def taught(cost):
    """A pacer that has seen passes of both kinds, of late without drafts, a token each."""
    pacer = Pacer()
    for size in [1, 5, 9] * 30 + [1] * 50:
        pacer.observe_round(size, 1, cost(size), cost(size), gained=1)
    return pacer


@pytest.mark.parametrize("cost", [flat, jump])
def test_pass_costs_are_learnt(cost):
    verify = taught(cost).verify
    assert verify.plain == pytest.approx(cost(1))
    assert verify.per_token == pytest.approx(1 * MS, rel=0.4)
    assert verify(9) == pytest.approx(cost(9), rel=0.02)


def test_one_slow_pass_counts_little():
    verify = PassCost()
    for _ in range(20):
        verify.observe(5, 0.1)
        verify.observe_plain(0.1)
    verify.observe(5, 9.0)
    verify.observe_plain(9.0)
    assert verify(5) < 0.11
    assert verify.plain < 0.11


def test_it_sees_a_pass_of_each_kind_before_it_decides():
    pacer = Pacer()
    assert pacer.best_length([0.0] * 30, 1) == FIRST_LENGTH
    pacer.observe_round(1 + FIRST_LENGTH, 1, 0.1, 0.1, 1)
    assert pacer.best_length([1.0] * 30, 1) == 0
    assert not pacer.may_start([1.0], draft_steps=1)
    pacer.observe_round(1, 1, 0.1, 0.1, 1)
    assert pacer.best_length([1.0] * 30, 1) == 30


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
    assert taught(cost).best_length(gains, 1) == length


def test_worth_weighs_draft_passes_and_the_jump():
    cheap, dear = taught(flat), taught(jump)
    for pacer in (cheap, dear):
        pacer.observe_draft_pass(40 * MS)
    assert cheap.worth([0.6], 0, draft_steps=1)
    assert not cheap.worth([0.3], 0, draft_steps=1)
    assert cheap.worth([0.3], 1)
    assert not dear.worth([0.6], 0, draft_steps=1)
    assert dear.worth([0.3], 1)  # the jump is paid


def test_a_long_text_is_read_only_if_that_pays():
    pacer = taught(flat)
    for _ in range(5):
        pacer.observe_draft_pass(20 * MS)
    pacer.observe_draft_pass(2.0, tokens=1000)  # 2 ms a token
    pacer.observe_prefill(1000, 8.0)
    assert pacer.may_start([0.8], 1, backlog=1000, tokens_left=200)
    assert not pacer.may_start([0.8], 1, backlog=1000, tokens_left=10)
    assert not any(pacer.may_start([0.1], 1, backlog=1000, tokens_left=10) for _ in range(40))  # nor tried
    assert any(pacer.may_start([0.1], 1, backlog=0, tokens_left=10) for _ in range(40))
    pacer.observe_prefill(1000, 0.1)  # a target that reads so fast has a draft that does
    assert pacer.may_start([0.8], 1, backlog=1000, tokens_left=10)


@pytest.mark.parametrize("length", [0, 1, 7])
def test_a_given_length_is_kept(length):
    pacer = Pacer(length)
    assert pacer.best_length([0.0] * 9, 1) == length
    assert [pacer.worth([0.0], d) for d in range(9)] == [d < length for d in range(9)]
    assert pacer.may_start([0.0], 1) == (length > 0)


def test_it_asks_again_after_ever_longer_pauses():
    pacer = taught(flat)
    pacer.observe_draft_pass(1.0)
    started = [pacer.may_start([0.1], 1) for _ in range(20)]
    assert [i for i, start in enumerate(started) if start] == [0, 2, 6, 14]


def test_ngram_guesses_are_scored_though_never_drafted():
    """The text 1 2 3 1 2 3 ...: after the first lap every guess comes true."""
    pacer, proposer = taught(forbidding), NgramProposer()
    text = torch.tensor([[1, 2, 3] * 20])

    def context(end):
        return Context(
            tokens=text,
            pads=[0],
            ends=[end],
            active=[True],
            room=[60 - end],
            sampling=False,
            chains_only=False,
            vocab_size=9,
            processors=None,
            pacer=pacer,
        )

    proposer.begin(context(4))
    assert all(proposer.propose(context(end)).size == 1 for end in range(4, 50))
    assert pacer.acceptance.rate((3, 0)) > 0.95
    text[0, 49] = 7
    proposer.propose(context(50))
    assert pacer.acceptance.rate((3, 0)) < 0.95


def test_a_call_starts_anew_with_what_others_learnt():
    """Pauses and counts are the call's own, costs and acceptance are everybody's."""
    first = taught(flat)
    first.observe_draft_pass(1.0)
    for _ in range(20):
        first.may_start([0.1], 1)
    second = Pacer(learnt=first.learnt)
    assert second.measured
    assert (second.passes.count, first.passes.count) == (0, 1)
    assert second.draft_step == 1.0
    assert second.may_start([0.1], 1)


def test_threads_share_what_they_learn():
    """Four at once, switching as often as Python can: no exception, and every estimate stays a sensible one."""
    learnt = taught(flat).learnt
    failures = []

    def call():
        pacer = Pacer(learnt=learnt)
        try:
            for i in range(500):
                size = 1 + 4 * (i % 2)
                pacer.observe_draft_pass(20 * MS)
                pacer.observe_round(size, 1, flat(size), flat(size), 1)
                pacer.observe_keys([i % 20, i % 7], 1)
                pacer.observe_expectation(0.5)
                pacer.may_start([0.5], 1)
                assert pacer.draft_step == pytest.approx(20 * MS)
                assert pacer.verify(5) == pytest.approx(flat(5), rel=0.02)
                assert pacer.verify.plain == pytest.approx(flat(1), rel=0.02)
                assert pacer.seconds_per_token == pytest.approx(flat(3), rel=0.05)
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
