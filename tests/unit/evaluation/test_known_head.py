"""The head that the registry lists for a target: the doctor measures it, whatever it was asked about."""

import shutil

import pytest

from specdec.evaluation.doctor import diagnose
from specdec.evaluation.known_head import KnownHead
from specdec.heads import registry
from specdec.heads.eagle3.export import save
from specdec.heads.registry import Known
from tests.support import eagle3, tiny, tiny_llama


@pytest.fixture
def target():
    with tiny_llama.target() as made:
        yield made


@pytest.fixture
def folder(target, tmp_path, monkeypatch):
    """A head of the project's for the tiny target, in the cache."""
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    monkeypatch.setenv("SPECDEC_HEADS", "off")
    place = tmp_path / "heads" / "tiny-head"
    save(eagle3.head(tap_ids=(1, 2, 3)), place, "sglang")
    monkeypatch.setattr(registry, "HEADS", (tiny_llama.entry(place),))
    return place


def test_it_is_measured(target, folder):
    found = diagnose(target, "ngram", [tiny.prompts(9)["input_ids"][0]], max_new_tokens=8)
    given, head = found.drafting[:2]
    assert head.name == "n-grams and the known head tiny-head"
    assert head.code == 'SpeculativeGenerator(model, "ngram+eagle3")'
    assert head.report.num_calls == given.report.num_calls == 1
    assert head.name in found.summary()


@pytest.mark.parametrize("name", ["auto", "eagle3", "ngram+eagle3", "eagle3:FOLDER"])
def test_it_is_not_measured_twice(target, folder, name):
    assert KnownHead.of(target, name.replace("FOLDER", str(folder))) == KnownHead()


def test_a_head_that_is_not_here_is_said(target, folder):
    shutil.rmtree(folder)
    found = KnownHead.of(target, "ngram")
    assert found.method is None
    assert "the EAGLE-3 head tiny-head is known for this target, but was not measured: " in found.note
    summary = diagnose(target, "ngram", [tiny.prompts(9)["input_ids"][0]], max_new_tokens=8).summary()
    assert found.note in summary


def test_a_head_on_the_hub_is_not_downloaded_unasked(target, monkeypatch):
    monkeypatch.setattr(registry, "HEADS", (Known("tiny-llama", "someone/no-such-head"),))
    found = KnownHead.of(target, "ngram")
    assert found.method is None
    assert "measure it by the proposer 'eagle3'" in found.note
    assert KnownHead.of(tiny.model("llama"), "ngram") == KnownHead()
