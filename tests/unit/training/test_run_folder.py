"""The folder of a training run: whose it is, and going on where a run was stopped."""

import copy
import errno
import json
import shutil
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from specdec.cli.app import app
from specdec.heads.eagle3.checkpoint import load
from specdec.heads.eagle3.export import save
from specdec.training.initialization.eagle3 import initialize
from specdec.training.recipe import Recipe
from specdec.training.run_folder import RunFolder
from specdec.training.teacher.base import fingerprint
from tests.support import encoded, tiny
from tests.support.training import (
    SMALL,
    TEMPLATE,
    arguments,
    logged,
    process,
    run,
    same_heads,
    written,
)


@pytest.mark.slow
@pytest.mark.parametrize("cached", [True, False])
def test_the_command_trains_and_takes_up_its_work(files, tmp_path, cached):
    more = ["--cache-states"] if cached else []
    result = run(files, tmp_path, *more)
    assert result.exit_code == 0, result.output
    assert "% of the tokens in 2 held-out answers" in result.output
    assert "mean acceptance length on held-out prompts" in result.output
    assert (tmp_path / "states").exists() == cached
    evaluation = json.loads((tmp_path / "evaluation.json").read_text())
    assert evaluation["best_update"] == evaluation["log"][-1]["step"]
    before = load(tmp_path / "head").state_dict()
    again = run(files, tmp_path, *more)  # everything is done: nothing changes
    assert again.exit_code == 0, again.output
    after = load(tmp_path / "head").state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    other = run(files, tmp_path, *more, "--seed", "1")
    assert other.exit_code == 2
    assert "another recipe (seed was 0, is 1)" in other.output


@pytest.mark.slow
def test_a_run_that_was_cut_off_ends_as_if_it_had_not_been(files, tmp_path):
    whole = run(files, tmp_path / "whole")
    assert whole.exit_code == 0, whole.output
    assert run(files, tmp_path / "cut").exit_code == 0
    checkpoints = sorted((tmp_path / "cut" / "run").glob("checkpoint-*"), key=lambda p: int(p.name.split("-")[1]))
    (checkpoints[-1] / "trainer_state.json").write_text("{")  # as if killed while it was written
    assert RunFolder(tmp_path / "cut").last_checkpoint() == str(checkpoints[-2])
    (tmp_path / "cut" / "evaluation.json").unlink()
    (tmp_path / "cut" / "head" / "model.safetensors").unlink()
    assert run(files, tmp_path / "cut").exit_code == 0
    assert same_heads(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.slow
def test_killed_and_taken_up_again(files, tmp_path):
    long = ["--epochs", "30", "--cache-states", "--save-every", "15"]
    assert run(files, tmp_path / "whole", *long).exit_code == 0
    killed = process(["-m", "specdec", *arguments(files, tmp_path / "killed", *long)])
    folder = RunFolder(tmp_path / "killed")
    deadline = time.monotonic() + 120
    while folder.last_checkpoint() is None and killed.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    killed.kill()  # SIGKILL
    killed.wait()
    assert folder.last_checkpoint() is not None, killed.stdout.read()
    assert not (tmp_path / "killed" / "evaluation.json").exists()  # it had not come to the end
    assert run(files, tmp_path / "killed", *long).exit_code == 0
    assert "accuracy_2" in logged(tmp_path / "whole")[-1]  # the third step comes in the run's second half
    assert logged(tmp_path / "killed") == logged(tmp_path / "whole")
    assert same_heads(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.slow
def test_a_run_in_slices(files, tmp_path):
    assert run(files, tmp_path / "whole").exit_code == 0
    for _ in range(60):
        result = run(files, tmp_path / "slices", "--max-minutes", "0")
        assert result.exit_code == 0, result.output
        if "not finished yet" not in result.output:
            break
    assert same_heads(tmp_path / "whole", tmp_path / "slices")


def test_a_folder_of_before_an_option_was_there_is_taken_up(tmp_path):
    mine, folder = Recipe("target", Path("data"), tmp_path), RunFolder(tmp_path)
    identity = mine.identity("sha", "weights")
    folder.write_identity({key: value for key, value in identity.items() if key != "start_from"})
    folder.check_identity(identity, mine.defaults())
    other = Recipe("target", Path("data"), tmp_path, start_from="head")
    with pytest.raises(ValueError, match=r"another recipe \(--from was None, is head\)"):
        folder.check_identity(other.identity("sha", "weights"), other.defaults())


def test_mtp_layers_of_all_tokens_are_another_recipe(tmp_path):
    folder, recipes = (
        RunFolder(tmp_path),
        [Recipe("target", Path("data"), tmp_path, kind="mtp", draft_vocab=n) for n in (None, 8192)],
    )
    folder.write_identity(recipes[0].identity("sha", "weights"))
    with pytest.raises(ValueError, match="draft_vocab was all, is 8192"):
        folder.check_identity(recipes[1].identity("sha", "weights"), recipes[1].defaults())


def test_an_optimizer_that_was_the_default_is_named(tmp_path):
    recipe, folder = Recipe("target", Path("data"), tmp_path, kind="dspark"), RunFolder(tmp_path)
    folder.write_identity(recipe.identity("sha", "weights") | {"optimizer": "adamw"})
    with pytest.raises(ValueError, match="resume with --optimizer adamw"):
        folder.check_identity(recipe.identity("sha", "weights"), recipe.defaults())


def test_failures_as_they_come_are_understood(tmp_path):
    """Not as somebody thinks they do: of a device that is full, and of more memory than there is."""
    with pytest.raises(ValueError, match="the disk is full"), RunFolder(tmp_path).readable_errors(""):
        torch.save(torch.ones(100_000), "/dev/full")
    with pytest.raises(ValueError, match="the disk is full"), RunFolder(tmp_path).readable_errors(""):
        Path("/dev/full").write_text("a")
    with pytest.raises(ValueError, match="out of memory: use less"), RunFolder(tmp_path).readable_errors("use less"):
        torch.empty(1 << 50)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full"),
        (torch.OutOfMemoryError("CUDA out of memory"), "use fewer --rows-at-once"),
    ],
)
def test_failures_for_want_of_room_are_clear(files, tmp_path, monkeypatch, error, message):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr("specdec.training.trainer.HeadTrainer.train", fail)
    result = run(files, tmp_path)
    assert result.exit_code == 2
    assert message in result.output
    assert "Run the same command again to resume" in result.output.replace("\n", " ")


@pytest.mark.slow
def test_a_chat_template_may_show_the_time(files, tokenizer, tmp_path):
    """Tokens of another day would not fit the states of the first."""
    shutil.copytree(files / "model", tmp_path / "model")
    dated = copy.deepcopy(tokenizer)
    dated.chat_template = "{{ ('a ' * (strftime_now('%f') | int % 13)) }}" + TEMPLATE
    dated.save_pretrained(tmp_path / "model")
    entries = [{"prompt": "a b", "response": " ".join("cdefghij"[: 2 + i % 7])} for i in range(12)]
    data = written(tmp_path / "data.jsonl", *entries)
    command = ["train", str(tmp_path / "model"), str(data), str(tmp_path / "out"), *SMALL.split(), "--cache-states"]
    first = CliRunner().invoke(app, [*command, "--max-minutes", "0"])
    assert "not finished yet" in first.output
    texts = (tmp_path / "out" / "texts.safetensors").read_bytes()
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 0, again.output
    assert (tmp_path / "out" / "texts.safetensors").read_bytes() == texts
    written(tmp_path / "data.jsonl", *entries[1:])
    other = CliRunner().invoke(app, command)
    assert other.exit_code == 2
    assert "another recipe (its texts differ)" in other.output.replace("\n", " ")
    assert (tmp_path / "out" / "texts.safetensors").read_bytes() == texts


@pytest.mark.slow
def test_one_folder_has_one_name(files, tmp_path, monkeypatch):
    assert "not finished yet" in run(files, tmp_path / "out", "--cache-states", "--max-minutes", "0").output
    monkeypatch.chdir(files)
    command = ["train", "./model", "data.jsonl", str(tmp_path / "out"), *SMALL.split(), "--cache-states"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output


def test_a_target_that_has_changed_since_is_said(files, tokenizer, tmp_path):
    shutil.copytree(files / "model", tmp_path / "model")
    command = ["train", str(tmp_path / "model"), str(files / "data.jsonl"), str(tmp_path / "out"), *SMALL.split()]
    assert CliRunner().invoke(app, [*command, "--max-minutes", "0"]).exit_code == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert fingerprint(model) == fingerprint(AutoModelForCausalLM.from_pretrained(files / "model"))
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.01)
    model.save_pretrained(tmp_path / "model")
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert "another recipe (its target's weights differ): choose another folder" in result.output


def content(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "name",
    [
        "texts.safetensors",
        "held_out.part",
        "every_text",
        "evaluation.json",
        "curve.png",
        "head/config.json",
        "run/checkpoint-9/mine",
        "states/mine",
        "recipe.json",
    ],
)
@pytest.mark.parametrize("text", ["mine", '{"flour": 1}', "[1]"])
def test_files_of_others_are_not_written_over(files, tmp_path, name, text):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    (tmp_path / "notes.txt").write_text("mine")
    before = content(tmp_path)
    result = run(files, tmp_path, "--max-minutes", "0")
    assert result.exit_code == 2, result.output
    assert "choose another folder" in result.output.replace("\n", " ")
    assert {path: old for path, old in content(tmp_path).items() if path.name != ".lock"} == before


def test_a_run_that_was_stopped_before_its_target_was_read_is_taken_up(files, tmp_path):
    """Also by other options: nothing was made by these yet."""
    assert "none is left" in run(files, tmp_path, "--held-out", "50").output
    (tmp_path / "notes.txt").write_text("mine")  # which is in nobody's way
    assert (tmp_path / "recipe.json").exists()
    (tmp_path / "texts.safetensors").write_text("of a run that was killed")
    result = run(files, tmp_path, "--held-out", "3", "--max-minutes", "0")
    assert "not finished yet" in result.output, result.output
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_two_runs_do_not_share_a_folder(files, tmp_path):
    with RunFolder(tmp_path).lock():
        result = run(files, tmp_path)
    assert result.exit_code == 2
    assert f"another run is using {tmp_path}" in result.output


def test_texts_with_tokens_that_the_target_lacks(files, tmp_path):
    shutil.copytree(files / "model", tmp_path / "model")
    tiny.model("llama", num_hidden_layers=4, vocab_size=8).save_pretrained(tmp_path / "model")
    shutil.copy(files / "data.jsonl", tmp_path)
    result = run(tmp_path, tmp_path / "out", "--draft-vocab", "4")
    assert result.exit_code == 2
    assert "but the model has 8: use the model's own tokenizer" in " ".join(result.output.split())


def test_an_encoder_decoder_model_is_no_target(files, tmp_path):
    shutil.copytree(files / "model", tmp_path / "model")
    encoded.model("t5").save_pretrained(tmp_path / "model")
    shutil.copy(files / "data.jsonl", tmp_path)
    result = run(tmp_path, tmp_path / "out")
    assert result.exit_code == 2
    assert "is an encoder-decoder model" in " ".join(result.output.split())


def test_no_epochs_are_refused(files, tmp_path):
    result = run(files, tmp_path / "out", "--epochs", "0")
    assert result.exit_code == 2
    assert "epochs must be a number above 0" in " ".join(result.output.split())


def test_a_trainings_folder_is_no_head_but_holds_one(files, tmp_path):
    save(initialize(tiny.model("llama", num_hidden_layers=4), torch.arange(20)), tmp_path / "head")
    with pytest.raises(ValueError, match=f"has no config.json: it is a training run, use its head in {tmp_path}/head"):
        load(tmp_path)


def test_results_do_not_go_into_a_models_folder(files):
    before = sorted(files.glob("model/*"))
    result = run(files, files / "model")
    assert result.exit_code == 2
    assert "is a model's folder: choose another one" in result.output.replace("\n", " ")
    assert sorted(files.glob("model/*")) == before
