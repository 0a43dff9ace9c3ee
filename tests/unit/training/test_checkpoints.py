"""Checkpoints: a damaged one is named and passed over, and none is left half written."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import Trainer

from specdec.training.checkpoints import checkpoints
from specdec.training.run_folder import RunFolder
from tests.support.training import losses, run, same_heads

NAMES = ["model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json", "rng_state.pth"]


@pytest.fixture(scope="module")
def finished(files, tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "out"
    result = run(files, out)
    assert result.exit_code == 0, result.output
    assert len(checkpoints(RunFolder(out).checkpoints)) == 2
    return out


@pytest.fixture
def copied(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "out")
    return tmp_path / "out"


def damage(path, how):
    if how == "missing":
        path.unlink()
    elif how == "flipped":  # one byte in the middle, as a disk does it
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 255
        path.write_bytes(content)
    else:
        path.write_bytes(path.read_bytes()[: min(1000, path.stat().st_size // 2)])


@pytest.mark.parametrize(
    ("name", "how"), [*((name, how) for name in NAMES for how in ("truncated", "missing")), ("optimizer.pt", "flipped")]
)
def test_the_checkpoint_before_a_damaged_one_is_taken(copied, name, how):
    folder = RunFolder(copied)
    newest, before = checkpoints(folder.checkpoints)
    damage(newest / name, how)
    with pytest.warns(UserWarning, match="the run resumes from") as warned:
        assert folder.last_checkpoint() == str(before)
    [message] = [str(warning.message) for warning in warned]
    assert f"{newest / name} is {'missing' if how == 'missing' else 'damaged'}" in message
    assert message.endswith(f"the run resumes from the checkpoint before it, {before}")
    assert "\n" not in message


@pytest.mark.parametrize("name", [pytest.param("model.safetensors", marks=pytest.mark.slow), "optimizer.pt"])
def test_a_run_resumes_behind_a_damaged_checkpoint(files, finished, copied, name):
    newest, before = checkpoints(RunFolder(copied).checkpoints)
    damage(newest / name, "truncated")
    with pytest.warns(UserWarning, match=re.escape(f"{newest / name} is damaged")):
        result = run(files, copied)
    assert result.exit_code == 0, result.output
    assert f"resuming from {before}" in result.output.replace("\n", " ")
    assert RunFolder(copied).last_checkpoint() == str(newest)  # written again
    assert losses(copied) == losses(finished)
    assert same_heads(copied, finished)


@pytest.mark.slow
def test_no_checkpoint_left_is_one_sentence(files, copied, monkeypatch):
    for checkpoint in checkpoints(RunFolder(copied).checkpoints):
        damage(checkpoint / "model.safetensors", "truncated")
    with monkeypatch.context() as patch:
        patch.setattr("specdec.training.preparation.load_model", lambda *rest, **more: 1 / 0)
        result = run(files, copied)
    assert result.exit_code == 2, result.output
    output = " ".join(result.output.split())
    assert "no other checkpoint is left to resume from. Remove" in output
    for checkpoint in checkpoints(RunFolder(copied).checkpoints):
        assert f"{checkpoint / 'model.safetensors'} is damaged" in output
    shutil.rmtree(RunFolder(copied).checkpoints)  # as it says
    assert run(files, copied).exit_code == 0


@pytest.mark.parametrize(
    "part", ["_save_optimizer_and_scheduler", pytest.param("_save_rng_state", marks=pytest.mark.slow)]
)
def test_a_kill_while_a_checkpoint_is_written_leaves_none_that_is_damaged(files, finished, tmp_path, monkeypatch, part):
    count, save = 0, getattr(Trainer, part)

    def killed(self, output_dir):
        nonlocal count
        count += 1
        if count == 2:
            (Path(output_dir) / "optimizer.pt").write_bytes(b"half of it")
            raise KeyboardInterrupt
        save(self, output_dir)

    monkeypatch.setattr(Trainer, part, killed)
    assert run(files, tmp_path / "out").exit_code == 130
    monkeypatch.undo()
    folder = RunFolder(tmp_path / "out")
    assert [path.name for path in folder.checkpoints.glob("checkpoint-*")] == ["checkpoint-2"]
    assert folder.last_checkpoint() == str(folder.checkpoints / "checkpoint-2")
    result = run(files, tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert losses(tmp_path / "out") == losses(finished)
    assert not list((folder.checkpoints / "unfinished").glob("*"))


def test_two_checkpoints_stay(finished):
    names = [path.name for path in checkpoints(RunFolder(finished).checkpoints)]
    last = int(names[0].partition("-")[2])
    assert names == [f"checkpoint-{last}", f"checkpoint-{last - 2}"]
    state = torch.load(RunFolder(finished).checkpoints / names[0] / "optimizer.pt", weights_only=False)
    assert state["parts"]
