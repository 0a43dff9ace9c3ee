"""Products of parameters, of which the fast tests take a diagonal."""

import itertools
from collections.abc import Iterable, Mapping

import pytest


def diagonal(*axes: Iterable | Mapping, times: int = 1) -> list:
    """All combinations for `pytest.mark.parametrize`, slow but for those in which all axes step on together.

    These are `times` as many as the longest axis has values, and every value is in one of them. Shorter axes begin
    anew, each at another place, so that two of the same length do not go in step. A mapping's keys are ids.
    """
    named = [list(axis.items()) if isinstance(axis, Mapping) else [(str(one), one) for one in axis] for axis in axes]
    quick = {
        tuple((i + k * (i // len(axis))) % len(axis) for k, axis in enumerate(named))
        for i in range(times * max(map(len, named)))
    }
    return [
        pytest.param(
            *(axis[at][1] for axis, at in zip(named, place, strict=True)),
            id="-".join(axis[at][0] for axis, at in zip(named, place, strict=True)),
            marks=[] if place in quick else pytest.mark.slow,
        )
        for place in itertools.product(*(range(len(axis)) for axis in named))
    ]
