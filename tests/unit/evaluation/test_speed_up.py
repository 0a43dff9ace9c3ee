"""`SpeedUp`: one definition of a speed-up, and an interval that holds as often as it says."""

import random
from math import exp, inf, sqrt

import pytest

from specdec.evaluation.speed_up import SpeedUp, quantile


def test_by_hand():
    found = SpeedUp.of([[1.0, 1.0], [1.0, 4.0]], over=[[2.0, 2.0], [3.0, 12.0]])
    assert found.by_prompt == pytest.approx((2.0, 3.0))
    assert found.value == pytest.approx(sqrt(6))
    assert (found.low, found.high) == pytest.approx((sqrt(6), sqrt(6)))  # prompts differ, and that is no noise


def test_noise_within_a_prompt_widens_the_interval():
    found = SpeedUp.of([[1.0, 1.0]], over=[[2.0, 2.0 * exp(0.2)]])
    assert found.value == pytest.approx(2 * exp(0.1))
    margin = 63.657 * (0.2 / sqrt(2)) / sqrt(2)
    assert (found.low, found.high) == pytest.approx((2 * exp(0.1 - margin), 2 * exp(0.1 + margin)))


def test_a_single_turn_takes_the_spread_over_prompts():
    found = SpeedUp.of([[1.0], [1.0], [1.0]], over=[[1.0], [1.1], [1.2]])
    assert 0 < found.low < 1 < found.value < found.high < inf


def test_what_was_measured_once_has_no_interval():
    found = SpeedUp.of([[1.0]], over=[[2.0]])
    assert (found.value, found.low, found.high, found.interval) == (2.0, 0.0, inf, "-")
    assert str(found) == "2.00x"


def test_an_absurd_interval_is_not_shown():
    found = SpeedUp.of([[1.0, 1.0]], over=[[2.0, 2.2]])
    assert found.high > 40
    assert (found.interval, str(found)) == ("too noisy", "2.10x (too noisy)")


def test_the_baseline_makes_no_difference():
    one, other = [[1.0, 1.3], [2.0, 2.1]], [[1.5, 1.2], [2.5, 1.9]]
    there, back = SpeedUp.of(one, other), SpeedUp.of(other, one)
    assert there.value * back.value == pytest.approx(1)
    assert there.low * back.high == pytest.approx(1)


def test_quantiles_go_on_beyond_the_table():
    assert [quantile(n) for n in (11, 15, 30)] == pytest.approx([3.106, 2.947, 2.750], rel=0.01)


@pytest.mark.parametrize("noise", [0.05, 0.4])
def test_the_interval_holds_the_truth(noise):
    draw = random.Random(0)

    def paces(speed):
        return [[draw.lognormvariate(0, noise) / (speed * prompt) for _ in range(3)] for prompt in (1.0, 1.7)]

    found = [SpeedUp.of(paces(1.4), over=paces(1.0)) for _ in range(2000)]
    assert sum(one.low <= 1.4 <= one.high for one in found) / 2000 == pytest.approx(0.99, abs=0.007)
