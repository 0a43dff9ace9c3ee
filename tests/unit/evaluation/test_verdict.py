"""`judge`: by acceptance first, then by intervals, and never two different answers about the same machine."""

import random

import pytest

from specdec import Report
from specdec.evaluation.measured import Measured
from specdec.evaluation.verdict import TOO_NOISY, judge

EXACT = ((1.0, 1.0), (1.0, 1.0))


def method(name, speed, accepted=1, drafted=2, spread=0.0, base=EXACT):
    """A method `speed` times as fast as `base`; `spread` moves every other turn."""
    report = Report()
    for _ in range(20):
        report.record_round([drafted], [drafted], [accepted], 0.1)
    paces = tuple(tuple(pace / speed * (1 + spread * (i % 2)) for i, pace in enumerate(turns)) for turns in base)
    return Measured(name, f"<{name}>", 100, 1.0, 0.1, report, paces)


PLAIN = Measured("plain", "model.generate()", 100, 1.0, 0.1, paces=EXACT)


def said(*drafting):
    return judge(PLAIN, drafting).lines()


@pytest.mark.parametrize(("accepted", "drafted"), [(0, 0), (0, 4)])
def test_a_draft_without_accepted_tokens_is_never_recommended(accepted, drafted):
    """1.13x and 1.23x, by noise, were once called the fastest."""
    verdict = judge(PLAIN, [method("draft", 1.13, accepted, drafted), method("head", 1.23, accepted, drafted)])
    assert verdict.recommended is PLAIN
    assert verdict.certain
    [line] = verdict.lines()
    assert line == "recommended: plain decoding, model.generate(): next to nothing of any draft was accepted"


def test_nor_is_one_with_next_to_nothing_accepted():
    report = Report()
    for taken in [1] + 299 * [0]:
        report.record_round([4], [4], [taken], 0.1)
    head = Measured("head", "<head>", 100, 0.8, 0.1, report, ((0.8, 0.8), (0.8, 0.8)))
    assert f"{report.tokens_per_round:.2f}" == "1.00"
    assert judge(PLAIN, [head]).recommended is PLAIN


def test_the_fastest_with_its_interval():
    assert said(method("a", 1.5), method("b", 1.0)) == [
        "recommended: a, 1.50x plain decoding's speed (1.50 to 1.50): the fastest"
    ]


def test_an_earlier_method_is_preferred_to_a_later_one_that_is_hardly_faster():
    assert "recommended: a, " in said(method("a", 1.5), method("b", 1.6))[0]
    assert "recommended: b, " in said(method("a", 1.5), method("b", 1.8))[0]
    assert said(method("a", 1.5), method("b", 1.6))[0].endswith("no other is more than 10% faster")


def test_an_earlier_method_that_another_one_beats_is_no_rival():
    """Not even one that the best of the others is hardly faster than: more turns would not change it."""
    verdict = judge(PLAIN, [method("a", 1.5), method("b", 1.62), method("c", 1.7)])
    assert verdict.recommended.name == "b"
    assert verdict.certain
    assert not verdict.rivals


def test_an_interval_around_one_is_too_noisy():
    first, cure, meanwhile = said(method("a", 1.3, spread=0.5))
    assert first == f"{TOO_NOISY} whether a is faster than plain decoding"
    assert "--repeat 4" in cure
    assert "nothing else running" in cure
    assert "more prompts" in cure
    assert meanwhile == "meanwhile: plain decoding, model.generate()"


def test_intervals_that_overlap_are_too_noisy():
    first, _, meanwhile = said(method("a", 3.0), method("b", 3.6, spread=0.2))
    assert first == f"{TOO_NOISY} which is the fastest: a or b. Faster than plain decoding: a and b"
    assert meanwhile.startswith("meanwhile: a, 3.00x plain decoding's speed")


def test_what_was_measured_once_is_too_noisy():
    once = Measured("plain", "", 100, 1.0, 0.1, paces=((1.0,),))
    verdict = judge(once, [method("a", 2.0, base=((1.0,),))])
    assert verdict.lines()[0].startswith(TOO_NOISY)
    assert "--repeat 5" in verdict.lines()[1]


def test_what_is_surely_no_faster_is_not_doubted():
    assert said(method("a", 1.02)) == ["recommended: plain decoding, model.generate(): no draft is more than 3% faster"]
    assert judge(PLAIN, [method("a", 2.0), method("slow", 0.3, spread=0.5)]).rivals == ()


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("truth", [(1.0, 1.05), (1.03, 1.02), (1.3, 1.35, 0.7), (1.6, 1.76, 1.8), (1.5, 2.5, 1.0)])
def test_runs_agree_or_are_too_noisy(truth, noise):
    """Many runs with the same true speeds: recommendations that are certain are the same, but for one in a hundred."""
    draw, certain = random.Random(str((truth, noise))), []
    runs = 400
    for _ in range(runs):

        def noisy(speed):
            return tuple(tuple(draw.lognormvariate(0, noise) / speed for _ in range(3)) for _ in range(2))

        plain = Measured("plain", "", 100, 1.0, 0.1, paces=noisy(1.0))
        report = method("", 1.0).report
        drafting = [Measured(str(i), "", 100, 1.0, 0.1, report, noisy(speed)) for i, speed in enumerate(truth)]
        verdict = judge(plain, drafting)
        if verdict.certain:
            certain.append(verdict.recommended.name)
        else:
            assert TOO_NOISY in verdict.lines()[0]
    most = max(map(certain.count, certain), default=0)
    assert len(certain) - most <= 0.01 * len(truth) * runs
