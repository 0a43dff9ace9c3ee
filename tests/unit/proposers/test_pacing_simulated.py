"""What pacing makes of recorded costs, on texts of all kinds: never much slower than plain, nearly the best fixed
length. Simulated: no model, no clock."""

import pytest

from specdec.proposers.pacing.estimates import Estimates, PassCost
from tests.support.simulated import CALLS, HOPELESS, KINDS, TABLES, TEXTS, TOKENS, over_all, speedups, text

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
