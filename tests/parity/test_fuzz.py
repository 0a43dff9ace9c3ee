"""Random combinations of arguments against plain `generate()`; see `tests/support/fuzz.py` for what is compared."""

import pytest

from tests.support import fuzz

BLOCK = 20  # cases per test: few enough to find the culprit by eye, many enough not to drown the list


def check(first: int) -> None:
    wrong = {}
    for seed in range(first, first + BLOCK):
        message, _ = fuzz.run(seed)
        if message:
            wrong[fuzz.describe(seed)] = message
    assert not wrong


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in (BLOCK, 2 * BLOCK))])
def test_some_cases(first):
    check(first)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(60, 1000, BLOCK))
def test_many_cases(first):
    check(first)
