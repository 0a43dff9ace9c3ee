"""What passes cost, kept between processes: found again, never in the way."""

import json
import os
import threading
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from specdec import DraftModelProposer, Eagle3Proposer, HybridProposer, NgramProposer, SpeculativeGenerator
from specdec.engine.draft_session import CallKind
from specdec.models.int8_linear import with_int8_linears
from specdec.proposers.pacing.cost_store import CostStore, shape
from specdec.proposers.pacing.estimates import DraftCost
from specdec.proposers.pacing.pass_cost import PassCost
from tests.support import eagle3, tiny

NOTHING: dict = {}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.delenv("SPECDEC_KEEP_COSTS")
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    return tmp_path / "costs"


def passes(cost=None):
    """As observed, three times each."""
    out = PassCost()
    for _ in range(3):
        for size, seconds in (cost or {1: 0.1, 4: 0.12, 8: 0.2}).items():
            out.observe(size, seconds)
    return out


def steps(cost=0.3):
    out = DraftCost()
    out.observe(cost)
    return out


def test_another_process_finds_what_was_kept(llama, draft):
    CostStore(llama, 1, draft).keep(passes(), steps())
    found, drafting = CostStore(llama, 1, draft).read()
    assert not found.known  # before a pass here has shown how fast this process is
    found.observe(1, 0.5)
    assert found(8) == pytest.approx(2.0, rel=0.1)
    assert drafting.step == pytest.approx(0.3, rel=0.1)


def test_rows_targets_and_drafts_are_told_apart(llama, draft, models):
    CostStore(llama, 1, draft).keep(passes(), steps())
    assert CostStore(llama, 1).read()[0].seen()  # whatever drafts, the target's passes cost the same
    assert CostStore(llama, 1, llama).read()[1].share == DraftCost().share
    assert CostStore(llama, 2, draft).read()[0].seen() == NOTHING
    assert CostStore(draft, 1, draft).read()[0].seen() == NOTHING
    assert CostStore(models("llama", seed=5), 1, draft).read()[0].seen()  # the same shape


def test_two_drafts_of_one_target_share_a_file(llama, draft, folder):
    CostStore(llama, 1, draft).keep(passes(), steps(0.3))
    CostStore(llama, 1, llama).keep(passes(), steps(0.9))
    CostStore(llama, 1).keep(passes({1: 0.1, 2: 0.3}), DraftCost())
    assert len(list(folder.iterdir())) == 1
    assert CostStore(llama, 1, draft).read()[1].share == pytest.approx(0.3, rel=0.1)
    assert CostStore(llama, 1, llama).read()[1].share == pytest.approx(0.9, rel=0.1)


def test_a_shape_is_what_costs_not_what_was_learnt(models):
    llama = models("llama")
    assert shape(llama) == shape(models("llama", seed=7))
    others = [
        models("llama", num_hidden_layers=1),
        models("llama", attn_implementation="eager"),
        models("llama").__class__(llama.config).bfloat16(),
    ]
    assert len({shape(model) for model in (llama, *others)}) == 4
    linear = nn.Sequential(nn.Linear(64, 64))
    assert shape(linear) != shape(with_int8_linears(linear))


def test_only_news_is_written(llama, draft, monkeypatch):
    written = []
    monkeypatch.setattr(os, "replace", lambda old, new: written.append(new))
    kept = CostStore(llama, 1, draft)
    kept.keep(PassCost(), DraftCost())  # nothing seen
    kept.keep(passes({1: 0.1}), DraftCost())  # nor anything that another process would ask for
    assert not written
    kept.keep(passes(), steps())
    assert len(written) == 1
    kept.keep(passes({1: 0.2, 4: 0.25, 8: 0.41}), steps(0.31))  # a slower moment, all in all
    assert len(written) == 1
    kept.keep(passes({1: 0.1, 4: 0.2, 8: 0.2}), steps())
    assert len(written) == 2
    kept.keep(passes({1: 0.1, 4: 0.2, 8: 0.2}), steps(0.6))
    assert len(written) == 3


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "7",
        '{"passes": 1}',
        '{"passes": {"1": 2}, "steps": {}}',
        '{"passes": {"1": [1.0, 3], "5": [1.0, 3]}, "steps": {}}',
        '{"passes": {"1": [-1.0, 3]}, "steps": {}}',
        '{"passes": {"1": [NaN, 3]}, "steps": {}}',
        '{"passes": {"one": [1.0, 3]}, "steps": {}}',
        '{"passes": {"1": [1.0, 3]}, "steps": {"a": "b"}}',
        '{"passes": {"1": [1.0, 3]}}',
        "[" * 100_000,
        "\ud800",
    ],
)
def test_a_damaged_file_is_as_good_as_none(llama, text):
    kept = CostStore(llama, 1)
    kept.path.parent.mkdir(parents=True)
    kept.path.write_bytes(text.encode("utf-8", "surrogatepass"))
    assert kept.read()[0].seen() == NOTHING
    kept.keep(passes(), DraftCost())
    assert CostStore(llama, 1).read()[0].seen()


def test_a_folder_that_cannot_be_written_is_no_matter(llama, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "file"))
    kept = CostStore(llama, 1)
    kept.keep(passes(), DraftCost())
    assert kept.read()[0].seen() == NOTHING


@pytest.mark.parametrize("step", [(os, "replace"), (json, "dumps")], ids=["replaced", "written"])
@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt()], ids=["no space", "interrupted"])
def test_what_fails_half_way_leaves_nothing(llama, folder, step, error, monkeypatch):
    kept, done = CostStore(llama, 1), step[0].__dict__[step[1]]

    def refuse(*args, indent=None):
        if step[0] is os or indent:  # what is written, not what names the file
            raise error
        return done(*args)

    monkeypatch.setattr(*step, refuse)
    with pytest.raises(KeyboardInterrupt) if isinstance(error, KeyboardInterrupt) else nullcontext():
        kept.keep(passes(), DraftCost())
    assert list(folder.iterdir()) == []


def test_it_can_be_switched_off(llama, folder, monkeypatch):
    CostStore(llama, 1).keep(passes(), DraftCost())
    monkeypatch.setenv("SPECDEC_KEEP_COSTS", "0")
    assert CostStore(llama, 1).read()[0].seen() == NOTHING
    CostStore(llama, 2).keep(passes(), DraftCost())
    assert len(list(folder.iterdir())) == 1


def test_many_at_once(llama, draft):
    failures = []

    def work(seconds):
        try:
            for i in range(40):
                kept = CostStore(llama, 1, draft)
                kept.keep(passes({1: 0.1, 4: seconds * (1 + i % 2)}), steps(seconds))
                assert kept.read()[0].seen().keys() == {1, 4}
        except BaseException as error:  # in a thread it would be lost
            failures.append(error)

    threads = [threading.Thread(target=work, args=(0.1 * n,)) for n in (2, 4, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert json.loads(CostStore(llama, 1, draft).path.read_text())


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(
    "proposer",
    [
        NgramProposer,
        lambda: DraftModelProposer(tiny.model("llama", seed=1, num_hidden_layers=1)),
        lambda: HybridProposer(Eagle3Proposer(eagle3.head())),
    ],
)
def test_no_table_changes_the_text(llama, proposer, rows, folder):
    """What calls leave, and absurd tables in its place."""
    inputs, arguments = tiny.prompts(*[9, 6][:rows]), {"max_new_tokens": 32, "min_new_tokens": 32}
    for sampling in (False, True):
        arguments["do_sample"] = sampling
        torch.manual_seed(3)
        plain = llama.generate(**inputs, **arguments)
        made = proposer()
        for cost in (None, {1: 1.0, 2: 1e-6, 24: 1e-6}, {1: 1e-6, 2: 1e6}, {24: 1e300}):
            spec = SpeculativeGenerator(llama, made)
            kept = CostStore(llama, rows, made.drafting_model())
            if cost is not None:
                kept.path.parent.mkdir(exist_ok=True)
                table = {str(size): [seconds, 3] for size, seconds in cost.items()}
                kept.path.write_text(json.dumps({"passes": table, "steps": {kept._draft: 1e-6}}))
            torch.manual_seed(3)
            assert spec.generate(**inputs, **arguments).tolist() == plain.tolist()


def test_calls_keep_what_they_learnt_and_the_next_process_starts_from_it(llama, draft, single):
    """Another generator, as another process makes one."""
    SpeculativeGenerator(llama, draft, draft_length=3).generate(**single, max_new_tokens=24, do_sample=False)
    kept = CostStore(llama, 1, DraftModelProposer(draft).drafting_model())
    assert set(kept.read()[0].seen()) >= {4}
    assert kept.read()[1].share != DraftCost().share
    other = SpeculativeGenerator(llama, draft)
    assert other._sessions.own.pacer(CallKind(1, sampling=False), None).verify.seen() == kept.read()[0].seen()
