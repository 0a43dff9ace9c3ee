"""What pacing makes of recorded costs, on texts of all kinds: never much slower than plain, nearly the best fixed
length. Simulated: no model, no clock."""

from itertools import groupby
from statistics import fmean

import pytest

from specdec.proposers.pacing.estimates import Estimates
from specdec.proposers.pacing.pass_cost import PassCost
from tests.support.simulated import CALLS, HOPELESS, KINDS, TABLES, TEXTS, TOKENS, over_all, speedups, text
from tests.support.slowdowns import SLOWDOWNS

FIXED = {"lookup": ["lookup"], "draft model": ["draft model"], "head": ["head"], "hybrid": ["lookup", "draft model"]}
LENGTHS = (0, 2, 4, 7, 15)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", HOPELESS)
def test_what_never_pays_costs_next_to_nothing_from_the_first_call_on(kind, table, name):
    each = speedups(kind, table, HOPELESS[name])
    assert min(each) > 0.93
    assert over_all(each) > 0.97


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("kind", FIXED)
@pytest.mark.parametrize("name", TEXTS)
def test_it_keeps_up_with_the_best_fixed_length(kind, table, name):
    best = max(
        over_all(speedups(alone, table, TEXTS[name], length=length)) for alone in FIXED[kind] for length in LENGTHS
    )
    assert over_all(speedups(kind, table, TEXTS[name])) > 0.85 * best


@pytest.mark.parametrize("table", ["cheap float32", "bf16", "gpu", "powers of two"])  # where drafts pay
def test_a_draft_that_is_better_than_it_thinks_is_found_out(table):
    """Small models: random weights are never sure, a prompt is dear to read, deciding takes a share of each round."""
    calls = text(CALLS * TOKENS, repeats=0.0, knows=0.08, seed=6, modest=0.9).parts(TOKENS)
    best = max(over_all(speedups("draft model", table, calls, looking=0.02, length=n)[CALLS // 2 :]) for n in LENGTHS)
    assert over_all(speedups("draft model", table, calls, looking=0.02)[CALLS // 2 :]) > 0.85 * best > 1.1


def test_costs_known_beforehand_are_made_use_of_at_once():
    """From a cache, say: the first call of a process is as fast as later ones."""
    costs = {1: (9.0, 3), 2: (18.9, 3), 4: (21.6, 3), 8: (22.5, 3), 16: (26.1, 3)}  # another machine's

    def first_calls(known):
        each = [(text, Estimates(PassCost(costs) if known else None)) for text in TEXTS["very good"]]
        return over_all([speedups("lookup", "float32", [text], estimates=estimates)[0] for text, estimates in each])

    informed, ignorant = first_calls(True), first_calls(False)
    assert informed > 1.1 * ignorant


@pytest.mark.parametrize("slowdown", SLOWDOWNS)
@pytest.mark.parametrize("kind", KINDS)
def test_other_programs_do_not_make_drafting_slower_than_plain_decoding(kind, slowdown):
    """Compared with plain decoding in the same noise: by the work that was done."""
    for table in TABLES:
        for name, calls in (TEXTS | HOPELESS).items():
            each = speedups(kind, table, calls, slowdown=SLOWDOWNS[slowdown])
            assert over_all(each) > 0.9, (table, name)


@pytest.mark.parametrize("slowdown", SLOWDOWNS)
@pytest.mark.parametrize("kind", KINDS)
def test_other_programs_cost_little_of_what_drafting_saves(kind, slowdown):
    kept = []
    for table in TABLES:
        for calls in TEXTS.values():
            quiet, slow = (
                over_all(speedups(kind, table, calls, **given)) for given in ({}, {"slowdown": SLOWDOWNS[slowdown]})
            )
            kept.append(slow / quiet)
    assert fmean(kept) > 0.9


@pytest.mark.parametrize("slowdown", SLOWDOWNS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("table", ["bf16", "gpu"])
def test_drafting_that_pays_is_not_given_up(kind, table, slowdown):
    """Once costs are known, there are at most ten rounds in a row without a draft, whatever other programs do."""
    estimates, sizes = Estimates(), []
    speedups(kind, table, TEXTS["very good"][:2], estimates=estimates)
    speedups(kind, table, TEXTS["very good"] * 3, slowdown=SLOWDOWNS[slowdown], estimates=estimates, sizes=sizes)
    assert longest_run_without_a_draft(sizes) <= 10


def longest_run_without_a_draft(sizes):
    return max((len(list(run)) for size, run in groupby(sizes) if size == 1), default=0)
