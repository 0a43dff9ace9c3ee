"""Releases of transformers: which are tested, what they name otherwise, and the warning about an unknown one."""

import inspect
import re
import sys
import warnings
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM
from typer.testing import CliRunner

from specdec import NgramProposer, SpeculativeGenerator, Unsupported
from specdec.cli.app import app
from specdec.models import capability, compat
from specdec.utils import releases
from tests.support import tiny

ROOT = Path(__file__).resolve().parents[2]


def pinned(file: str) -> dict[str, str]:
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    found = (re.match(r"([a-z_]+)==([\d.]+)", line) for line in lines)
    return {match[1]: match[2] for match in found if match}


@pytest.mark.parametrize("package", ["transformers", "torch"])
def test_the_ranges_are_those_that_ci_runs(package):
    """The lower bound of pyproject.toml, the constraints of the three environments and the README say the same."""
    oldest, newest = releases.TESTED[package]
    assert pinned("constraints-oldest.txt")[package].startswith(f"{oldest}.")
    assert pinned("constraints-newest.txt")[package].startswith(f"{newest}.")
    pin = releases.release(pinned("constraints.txt")[package])
    assert releases.release(oldest) <= pin <= releases.release(newest)
    assert f'"{package}>={oldest}",' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"{package} {oldest} to {newest}" in readme


@pytest.mark.parametrize("name", compat.CACHE_NAMES[:2])
def test_either_name_of_the_cache_continues_a_text_without_a_warning(llama, single, name):
    arguments = {"do_sample": False, "max_new_tokens": 12}
    expected = llama.generate(**single, **arguments)
    spec = SpeculativeGenerator(llama, NgramProposer(), on_unsupported="error")
    cache = DynamicCache(config=llama.config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = spec.generate(**single, **{name: cache}, do_sample=False, max_new_tokens=5)
        assert cache.get_seq_length() == first.shape[1] - 1
        second = spec.generate(
            first, attention_mask=torch.ones_like(first), **{name: cache}, do_sample=False, max_new_tokens=7
        )
    assert second.tolist() == expected.tolist()


def test_two_names_of_the_cache_in_one_call(llama, single):
    caches = {name: DynamicCache(config=llama.config) for name in compat.CACHE_NAMES[:2]}
    with pytest.raises(TypeError, match="cache and past_key_values are names of the same argument"):
        SpeculativeGenerator(llama, "ngram").generate(**single, **caches, max_new_tokens=3)


# A release that specdec does not know


@pytest.fixture
def renamed(monkeypatch):
    """transformers 5.31, in which the forward pass takes its cache under a third name."""
    original = LlamaForCausalLM.forward
    old = next(name for name in compat.CACHE_NAMES if name in inspect.signature(original).parameters)

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, kv_store=None, use_cache=None,
                logits_to_keep=0, return_dict=None):  # fmt: skip
        given = {"attention_mask": attention_mask, "position_ids": position_ids, "return_dict": return_dict}
        return original(self, input_ids, **given, use_cache=use_cache, logits_to_keep=logits_to_keep, **{old: kv_store})

    prepare = LlamaForCausalLM.prepare_inputs_for_generation

    def prepared(self, *args, **kwargs):
        inputs = prepare(self, *args, **kwargs)
        known = {*inspect.signature(forward).parameters, old}
        inputs = {name: value for name, value in inputs.items() if name in known}
        return {"kv_store" if name == old else name: value for name, value in inputs.items()}

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    monkeypatch.setattr(LlamaForCausalLM, "prepare_inputs_for_generation", prepared)
    installed = releases.installed
    monkeypatch.setattr(
        releases, "installed", lambda package: "5.31.0" if package == "transformers" else installed(package)
    )
    capability.installation_fault.cache_clear()
    yield
    capability.installation_fault.cache_clear()


def test_a_renamed_cache_is_named_as_the_releases_fault(renamed, single):
    model = tiny.on_host("llama")
    plain = model.generate(**single, do_sample=False, max_new_tokens=6)
    spec = SpeculativeGenerator(model, "ngram")
    with tiny.specdec_warnings() as said:
        assert spec.generate(**single, do_sample=False, max_new_tokens=6).tolist() == plain.tolist()
    oldest, newest = releases.TESTED["transformers"]
    [message] = said
    assert "transformers 5.31.0 is newer than the releases that this specdec was tested with" in message
    assert f"({oldest} to {newest})" in message
    assert f'pip install "transformers=={newest}.*"' in message
    assert "LlamaForCausalLM" not in message
    with pytest.raises(Unsupported, match=r"transformers 5\.31\.0 is newer"):
        SpeculativeGenerator(model, "ngram", on_unsupported="error").generate(**single, max_new_tokens=6)


def test_a_draft_model_is_not_blamed_either(renamed):
    with pytest.raises(ValueError, match=r"transformers 5\.31\.0 is newer") as raised:
        SpeculativeGenerator(tiny.model("gpt2"), tiny.on_host("llama"))
    assert "LlamaForCausalLM" not in str(raised.value)


def test_the_commands_say_it(renamed, tmp_path):
    run = CliRunner().invoke(app, ["--version"])
    assert run.exit_code == 0
    assert "transformers 5.31.0 (tested: " in run.stdout
    assert "warning: specdec does not work with the installed transformers" in run.stderr
    tiny.on_host("llama").save_pretrained(tmp_path)
    tiny.letters().save_pretrained(tmp_path)
    run = CliRunner().invoke(app, ["doctor", str(tmp_path), "ngram"])
    assert run.exit_code == 2
    assert "error: specdec does not work with the installed transformers" in run.stderr
    assert "transformers 5.31.0 is newer" in run.stderr


def test_a_release_that_only_the_number_sets_apart_works(monkeypatch, llama, single):
    """A newer one is used without a warning where all works; the commands mention it."""
    monkeypatch.setitem(releases.TESTED, "transformers", ("5.1", "5.2"))
    with tiny.specdec_warnings() as said:
        SpeculativeGenerator(llama, "ngram").generate(**single, max_new_tokens=3)
    assert said == []
    assert "is newer than the releases" in CliRunner().invoke(app, ["--version"]).stderr


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes since Python 3.11")
def test_an_error_within_a_call_carries_a_note_of_the_release(monkeypatch, llama, single):
    monkeypatch.setitem(releases.TESTED, "transformers", ("5.1", "5.2"))

    class Broken(NgramProposer):
        def propose(self, context):
            raise AttributeError("'DynamicCache' object has no attribute 'layers'")

    with pytest.raises(AttributeError) as raised:
        SpeculativeGenerator(llama, Broken()).generate(**single, max_new_tokens=6)
    assert any("is newer than the releases" in note for note in raised.value.__notes__)


def test_a_models_own_limit_is_still_its_own(single):
    """The check of the installation passes here, so the model's class is named."""
    model = tiny.on_host("llama")
    model.forward = lambda input_ids, attention_mask=None: None
    assert capability.capability(model).message("LlamaForCausalLM").startswith("LlamaForCausalLM: ")
