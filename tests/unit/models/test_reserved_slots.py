"""Slots that are allocated before passes are captured."""

import pytest

from specdec.models.cache import ragged_rows
from specdec.models.cache.buffers import Span
from specdec.models.cache.ragged_rows import CachedRows


@pytest.fixture
def rows():
    made = CachedRows([Span(), Span(window=100)])
    made.sized = True
    made.start(2)
    made.cache.begin_at([300, 20])
    return made


@pytest.mark.parametrize(
    ("more", "left", "sizes"),
    [
        pytest.param(8, None, (512, 512), id="the next pass"),
        pytest.param(300, None, (1024, 512), id="a large one"),
        pytest.param(8, [200, 300], (512, 512), id="a short call"),
        pytest.param(8, [200, 3000], (4096, 512), id="a long call"),
        pytest.param(8, [10**6, 0], (ragged_rows.MOST_AHEAD // 2, 512), id="longer than is allocated at once"),
    ],
)
def test_slots_for_the_rest_of_the_call(rows, more, left, sizes):
    assert rows.reserve(more, left) == sizes


def test_more_than_is_allocated_at_once_is_allocated_when_needed(rows):
    rows.cache.begin_at([20_000, 20])
    assert rows.reserve(8, [10**6, 10**6]) == (2**15, 512)
