"""Which head belongs to which target."""

import copy
import json
import os
import shutil
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from typer.main import get_command

from specdec import BlockProposer, Eagle3Proposer, HybridProposer, NgramProposer, SpeculativeGenerator
from specdec.cli.app import app
from specdec.heads import registry, shipped
from specdec.heads.dflash.export import save as save_block
from specdec.heads.eagle3.export import save
from specdec.heads.registry import Known, NoHead
from specdec.utils.download import Content, checksum, size_of
from tests.support import blocks, eagle3, tiny


@pytest.fixture
def target():
    made = tiny.model("llama", num_hidden_layers=4)
    before = made.config._name_or_path
    made.config._name_or_path = "some-org/Tiny-Llama/"
    yield made
    made.config._name_or_path = before


@pytest.fixture
def ours(target, tmp_path, monkeypatch):
    """A head of the project's for the tiny target, in the cache."""
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    save(eagle3.head(tap_ids=(1, 2, 3)), tmp_path / "heads" / "tiny-head", "sglang")
    return registered(monkeypatch, tmp_path / "heads" / "tiny-head")


@pytest.fixture
def drafter(target, tmp_path, monkeypatch):
    """A drafter of blocks of the project's, as `specdec train --kind dspark` writes one."""
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    save_block(blocks.head("DSpark", own_head=True, draft_vocab_size=40), tmp_path / "heads" / "tiny-drafter")
    return registered(monkeypatch, tmp_path / "heads" / "tiny-drafter", kind="dflash")


def registered(monkeypatch, folder, **changes):
    """Ahead of all others, for the tiny target. Returns its file of weights."""
    files = {path.name: Content(checksum(path), size_of(path)) for path in sorted(folder.iterdir())}
    entry = Known("tiny-llama", folder.name, files=files, **changes)
    monkeypatch.setattr(registry, "HEADS", (entry, *registry.HEADS))
    return folder / "model.safetensors"


def test_a_known_head_is_found(target, ours):
    assert isinstance(SpeculativeGenerator(target, "eagle3").proposer, Eagle3Proposer)
    for name in ("ngram+eagle3", "auto"):
        spec = SpeculativeGenerator(target, name, on_unsupported="error")
        assert isinstance(spec.proposer, HybridProposer)
        assert isinstance(spec.proposer.other, Eagle3Proposer)
    prompt = tiny.prompts(6)["input_ids"]
    out = spec.generate(prompt, do_sample=False, max_new_tokens=12)
    assert out.tolist() == target.generate(prompt, do_sample=False, max_new_tokens=12).tolist()


def test_a_known_drafter_of_blocks_is_found(target, drafter):
    spec = SpeculativeGenerator(target, "auto", on_unsupported="error")
    assert isinstance(spec.proposer, HybridProposer)
    assert isinstance(spec.proposer.other, BlockProposer)
    prompt = tiny.prompts(6)["input_ids"]
    out = spec.generate(prompt, do_sample=False, max_new_tokens=12)
    assert out.tolist() == target.generate(prompt, do_sample=False, max_new_tokens=12).tolist()
    for name in ("dflash", "ngram+dflash"):
        named = SpeculativeGenerator(target, name).proposer
        assert isinstance(named.other if name != "dflash" else named, BlockProposer)
    with pytest.raises(NoHead, match="no EAGLE-3 head is known for tiny-llama"):
        SpeculativeGenerator(target, "eagle3")


@pytest.mark.parametrize("last", ["ours", "drafter"])
def test_of_two_known_heads_the_first_is_taken(target, request, last):
    for name in ["drafter" if last == "ours" else "ours", last]:
        request.getfixturevalue(name)
    found = SpeculativeGenerator(target, "auto").proposer.other
    assert isinstance(found, BlockProposer if last == "drafter" else Eagle3Proposer)
    assert isinstance(SpeculativeGenerator(target, "eagle3").proposer, Eagle3Proposer)
    assert registry.find(target, "dflash").endswith("tiny-drafter")
    assert registry.at_hand("Tiny-Llama", "eagle3")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_target_by_another_name_is_known_by_what_it_is(target, ours, monkeypatch, dtype):
    entry, *others = registry.HEADS
    monkeypatch.setattr(registry, "HEADS", (replace(entry, fingerprint=registry.fingerprint(target)), *others))
    target.config._name_or_path = "/models/renamed"
    renamed = copy.deepcopy(target).to(dtype)
    assert registry.find(renamed, "eagle3").endswith("tiny-head")
    assert registry.known(renamed, "dflash") is None
    renamed.get_decoder().norm.weight.data[3] *= 1.05  # of another's training
    assert registry.known(renamed) is None
    assert registry.known(tiny.model("llama", num_hidden_layers=2)) is None


def test_fingerprints_of_other_models_are_none_or_their_own(models):
    """Whatever the model, looking for its head does no harm."""
    found = [registry.fingerprint(models(name)) for name in tiny.CONFIGS]
    known = [one for one in found if one is not None]
    assert len(known) > len(found) // 2
    assert not {entry.fingerprint for entry in registry.HEADS} & set(known)


def test_without_a_known_head(target, monkeypatch):
    with pytest.raises(NoHead, match='no EAGLE-3 head is known for tiny-llama: give one as "eagle3:PATH_OR_HUB_ID"'):
        SpeculativeGenerator(target, "eagle3")
    assert isinstance(SpeculativeGenerator(target, "auto").proposer, NgramProposer)


def test_a_head_that_is_not_there(target, ours, monkeypatch):
    shutil.rmtree(ours.parent)
    monkeypatch.setenv("SPECDEC_HEADS", "off")
    where = f"into {ours.parent}, or set SPECDEC_HEADS to a folder or URL that has tiny-head/model.safetensors"
    with pytest.raises(
        NoHead, match=f"is not on this machine: .*Copy config.json and model.safetensors from .*{where}"
    ):
        SpeculativeGenerator(target, "eagle3")
    with pytest.warns(UserWarning, match='"auto" drafts with n-grams: the head tiny-head is not on this machine'):
        assert isinstance(SpeculativeGenerator(target, "auto").proposer, NgramProposer)


def test_a_damaged_head_is_refused(target, ours):
    ours.write_bytes(ours.read_bytes()[:-1] + b"x")
    with pytest.raises(NoHead, match="its checksum differs"):
        SpeculativeGenerator(target, "eagle3")


def test_hub_ids_are_given_as_they_are(target):
    target.config._name_or_path = "Qwen/Qwen3-8B"
    assert registry.find(target, "eagle3") == "RedHatAI/Qwen3-8B-speculator.eagle3"


def test_every_head_of_ours_is_in_the_checkout_and_whole(target):
    for known in registry.HEADS:
        if known.files:
            target.config._name_or_path = known.target
            assert registry.find(target, known.kind).endswith(known.head)


# The recipes

RECIPES = sorted(shipped.head_folders()[0].glob("*/recipe.sh"))
FAKE = """#!/bin/sh
printf '%s\\0' "$@" >> "$LOG"; printf '\\n' >> "$LOG"
[ "$1" = regenerate ] && cp "$3" "$4"
[ "$1" = "$UNFINISHED" ] && echo "not finished yet: run the same command again to resume"
exit 0
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """Runs a recipe with a `specdec` that only writes down what it is asked. Returns status and commands."""
    (tmp_path / "specdec").write_text(FAKE)
    (tmp_path / "specdec").chmod(0o755)
    (tmp_path / "texts.jsonl").touch()

    def run(script, **environment):
        log = tmp_path / "log"
        log.unlink(missing_ok=True)
        path = f"{tmp_path}:{os.environ['PATH']}"
        command = [str(script), str(tmp_path / "texts.jsonl"), str(tmp_path / "out")]
        variables = os.environ | {"PATH": path, "LOG": str(log), "UNFINISHED": "", "MINUTES": ""} | environment
        done = subprocess.run(command, env=variables, capture_output=True, text=True)
        return done.returncode, [line.split("\0")[:-1] for line in log.read_text().splitlines()]

    return run


@pytest.mark.parametrize("script", RECIPES, ids=lambda path: path.parent.name)
def test_recipes_are_commands_that_exist(script, recipe):
    status, commands = recipe(script)
    assert status == 0
    assert [command[0] for command in commands].count("train") >= 1
    for name, *arguments in commands:
        get_command(app).commands[name].make_context(name, arguments)  # raises at an option that is none


@pytest.mark.parametrize("script", RECIPES, ids=lambda path: path.parent.name)
def test_recipes_stop_where_time_is_up(script, recipe):
    status, commands = recipe(script, UNFINISHED="train", MINUTES="5")
    assert status == 75
    assert commands[-1][0] == "train"
    assert [command[0] for command in commands].count("train") == 1
    assert commands[-1][-2:] == ["--max-minutes", "5"]


@pytest.mark.parametrize("script", RECIPES, ids=lambda path: path.parent.name)
def test_recipes_learn_from_nothing_they_evaluate_on(script, recipe):
    _, commands = recipe(script)
    assert all("--held-out" in command for command in commands if command[0] == "train")


def test_an_installation_finds_the_heads_of_the_checkout_it_was_made_from(monkeypatch, tmp_path):
    """After `pip install PATH`, as pip records it."""
    record = json.dumps({"url": tmp_path.as_uri(), "dir_info": {}})
    for recorded, found in ((record, True), (None, False), (json.dumps({"url": "https://example.org/a.whl"}), False)):
        installed = SimpleNamespace(read_text=lambda name, recorded=recorded: recorded)
        monkeypatch.setattr(shipped, "distribution", lambda name, installed=installed: installed)
        assert (tmp_path / "heads" in shipped.head_folders()) == found
