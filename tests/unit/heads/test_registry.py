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
from safetensors.torch import save_file
from typer.main import get_command
from typer.testing import CliRunner

from specdec import BlockProposer, Eagle3Proposer, HybridProposer, NgramProposer, SpeculativeGenerator
from specdec.cli.app import app
from specdec.heads import registry, shipped
from specdec.heads.dflash.export import save as save_block
from specdec.heads.eagle3.export import save
from specdec.heads.loading import read
from specdec.heads.registry import NoHead
from tests.support import blocks, eagle3, tiny, tiny_llama


@pytest.fixture
def target():
    with tiny_llama.target() as made:
        yield made


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
    monkeypatch.setattr(registry, "HEADS", (tiny_llama.entry(folder, **changes), *registry.HEADS))
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


SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
SHAPE |= {"num_hidden_layers": 2, "head_dim": 16, "vocab_size": tiny.VOCAB, "max_position_embeddings": 4096}
BLOCK = SHAPE | {"block_size": 5, "num_target_layers": 4, "rope_theta": 10000.0, "rms_norm_eps": 1e-6}
Z_LAB = {"architectures": ["DFlashDraftModel"], "dflash_config": {"mask_token_id": 63, "target_layer_ids": [0, 1]}}
DEEPSPEC = {"architectures": ["Qwen3DSparkModel"], "mask_token_id": 63, "target_layer_ids": [0, 1], "markov_rank": 4}
DEEPSPEC |= {"markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True}


def write_in(layout, folder):
    """A tiny head in a published layout."""
    if layout in ("z-lab", "DeepSpec"):
        head = blocks.head("DFlash") if layout == "z-lab" else blocks.head("DSpark", own_embedding=True, own_head=True)
        weights = {name: value.contiguous() for name, value in head.state_dict().items() if name != "d2t"}
        folder.mkdir()
        save_file(weights, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(BLOCK | (Z_LAB if layout == "z-lab" else DEEPSPEC)))
        return
    save(eagle3.head(tap_ids=(1, 2, 3)), folder, "speculators" if layout == "speculators" else "sglang")
    if layout == "SafeAILab":  # config.json of a plain Llama
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if "eagle" not in k}))


@pytest.mark.parametrize("entry", [entry for entry in registry.HEADS if not entry.files], ids=lambda entry: entry.head)
def test_published_heads_are_found_and_read_in_their_layouts(target, entry, monkeypatch, tmp_path):
    """Tiny heads stand for them. The first one of a target is that of "auto"."""
    write_in(entry.layout, tmp_path / "head")
    asked = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: asked.append(name) or tmp_path / "head")
    target.config._name_or_path = f"some-org/{entry.target}"
    first = next(known for known in registry.HEADS if known.target == entry.target)
    found = SpeculativeGenerator(target, "auto" if entry is first else f"{entry.kind}:{entry.head}").proposer
    assert asked == [entry.head]
    assert isinstance(getattr(found, "other", found), Eagle3Proposer if entry.kind == "eagle3" else BlockProposer)
    formats = {"SGLang": "SpecForge, SGLang or ModelOpt", "speculators": "vLLM speculators"}
    expected = formats.get(entry.layout, "SafeAILab EAGLE-3" if entry.layout == "SafeAILab" else entry.layout)
    assert read(tmp_path / "head").format == expected


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen3-8B",
        "Qwen/Qwen3-8B-FP8",
        "Qwen/Qwen3-8B-AWQ",
        "unsloth/Qwen3-8B-unsloth-bnb-4bit",
        "/models/qwen3-8b/",
        "/hub/models--Qwen--Qwen3-8B/snapshots/b968826d9c46dd6066d109eabc6255188de91218",
    ],
)
def test_quantized_and_downloaded_targets_have_the_same_head(target, name):
    target.config._name_or_path = name
    assert registry.find(target, "eagle3") == "RedHatAI/Qwen3-8B-speculator.eagle3"
    assert {entry.target for entry in registry.known_for(name)} == {"qwen3-8b"}


def test_other_models_of_a_family_have_none():
    for name in ("Qwen/Qwen3-8B-Base", "Qwen/Qwen3-0.6B", "meta-llama/Llama-3.1-8B", "gpt2"):
        assert not registry.known_for(name)
    assert registry.known_for("meta-llama/Meta-Llama-3.1-8B-Instruct")[0].head.startswith("yuhuili/")


def test_a_folder_is_known_by_its_weights(target, ours, monkeypatch, tmp_path):
    entry, *others = registry.HEADS
    monkeypatch.setattr(registry, "HEADS", (replace(entry, fingerprint=registry.fingerprint(target)), *others))
    target.save_pretrained(tmp_path / "renamed")
    assert [found.head for found in registry.known_for(str(tmp_path / "renamed"))] == ["tiny-head"]
    tiny.model("llama", num_hidden_layers=2).save_pretrained(tmp_path / "other")
    assert not registry.known_for(str(tmp_path / "other"))
    assert not registry.known_for(str(tmp_path))


def test_heads_are_listed(target, ours):
    lines = CliRunner().invoke(app, ["heads"]).stdout.splitlines()
    assert lines[0].split() == ["target", "kind", "layout", "source", "on", "this", "machine"]
    assert len(lines) == 1 + len(registry.HEADS)
    assert lines[1].split() == ["tiny-llama", "eagle3", "specdec", "tiny-head", str(ours.parent)]
    only = CliRunner().invoke(app, ["heads", "some-org/Tiny-Llama"]).stdout.splitlines()
    assert [line.split() for line in only] == [lines[0].split(), lines[1].split()]
    shutil.rmtree(ours.parent)
    assert CliRunner().invoke(app, ["heads", "tiny-llama"]).stdout.split()[-1] == "no"


def test_a_head_in_the_hubs_cache_is_listed(monkeypatch, tmp_path):
    head = "RedHatAI/Qwen3-32B-speculator.eagle3"
    monkeypatch.setattr(
        registry, "try_to_load_from_cache", lambda name, file: str(tmp_path / file) if name == head else None
    )
    listed = CliRunner().invoke(app, ["heads", "Qwen/Qwen3-32B"]).stdout
    assert listed.split()[-2:] == [head, str(tmp_path)]


@pytest.mark.parametrize(
    ("name", "draft"),
    [
        ("google/gemma-3-4b-it", '"ngram+draft:google/gemma-3-270m-it"'),
        ("Qwen/Qwen3-235B-A22B", '"ngram+draft:Qwen/Qwen3-0.6B"'),
        ("google/gemma-3-270m", '"ngram+draft:PATH_OR_ID"'),
        ("openai-community/gpt2", '"ngram+draft:PATH_OR_ID"'),
    ],
)
def test_without_a_head_it_is_said_what_helps(target, name, draft):
    target.config._name_or_path = name
    with pytest.warns(UserWarning, match='"auto" drafts with n-grams: no head is known for') as said:
        assert isinstance(SpeculativeGenerator(target, "auto").proposer, NgramProposer)
    for words in (str(said[0].message), CliRunner().invoke(app, ["heads", name]).stdout):
        assert draft in words
        assert "`specdec train`" in words
        assert len(words.splitlines()) == 1


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
