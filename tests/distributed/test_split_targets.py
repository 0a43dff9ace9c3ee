"""A target that lies in two processes teaches a head, in each of them a part of each batch, as a whole one does."""

import json
import os
from pathlib import Path

import pytest

from specdec.training import preparation
from specdec.training.recipe import Recipe
from specdec.training.run import train
from specdec.training.run_folder import RunFolder
from tests.support.ranks import together
from tests.support.training import losses, run

SMALL = {"draft_vocab": 30, "steps": 3, "length": 40, "epochs": 2.0, "batch_size": 2, "held_out": 2, "save_every": 2}
CASES = {
    "tp": {"shard": "tp"},
    "fsdp": {"shard": "fsdp"},
    "fsdp, states on the disk": {"shard": "fsdp", "cache_states": True},
}


def trained(files, out, **options):
    return train(Recipe(str(files / "model"), files / "data.jsonl", out, device="cpu", **SMALL | options))


def worker(rank: int, folder: Path):
    # As a launcher says; the processes know of each other already, and the address is not used.
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    files = Path((folder / "files.txt").read_text())
    return {name: trained(files, folder / name, **options) for name, options in CASES.items()}


def measured(out):
    """What is logged of held-out texts, and of the decoder's drafts."""
    log = json.loads(RunFolder(out).evaluation.read_text())["log"]
    return [entry[key] for entry in log for key in ("eval_loss", "decoder_tree_length") if key in entry]


@pytest.mark.slow
def test_two_processes_with_a_part_of_the_target_have_the_curve_of_one(files, tmp_path):
    (tmp_path / "files.txt").write_text(str(files))
    one = trained(files, tmp_path / "one")
    first, second = together("tests.distributed.test_split_targets:worker", tmp_path)
    assert len({RunFolder(tmp_path / name).identity()["weights"] for name in ("one", *CASES)}) == 1
    for name in CASES:
        assert [step for step, _ in losses(tmp_path / name)] == [step for step, _ in losses(tmp_path / "one")]
        found, whole = ([loss for _, loss in losses(tmp_path / which)] for which in (name, "one"))
        assert found == pytest.approx(whole, rel=1e-3)
        assert measured(tmp_path / name) == pytest.approx(measured(tmp_path / "one"), rel=2e-3)
        assert first[name].tree_length == pytest.approx(one.tree_length, rel=1e-3)
        assert second[name] is None  # the first one tells


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shard", "tp"], "is for several processes, but one was started"),
        (["--shard", "fsdp", "--cache-states"], "is for several processes, but one was started"),
        (["--shard", "tp", "--cache-states"], "use --shard fsdp"),
        (["--shard", "fsdp", "--kind", "mtp"], "--kind mtp needs the whole target in one process"),
        (["--shard", "tp", "--rounded-states", "--cache-states"], "--rounded-states needs the whole target"),
        (["--shard", "both"], "'both'"),
    ],
)
def test_what_cannot_be_split_is_said_before_anything_is_read(files, tmp_path, options, message):
    result = run(files, tmp_path / "out", *options)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())
    assert not (tmp_path / "out").exists()


def test_one_process_uses_all_devices(tmp_path):
    recipe = Recipe("target", Path("data"), tmp_path, shard="devices")
    recipe.check_processes(1)
    with pytest.raises(ValueError, match="uses all devices from one process, but 2 were started"):
        recipe.check_processes(2)


@pytest.mark.slow
def test_a_target_over_the_devices_teaches_the_same(files, tmp_path, monkeypatch):
    placed, load = [], preparation.load_model
    monkeypatch.setattr(preparation, "load_model", lambda name, **kw: placed.append(kw) or load(name, **kw))
    for name in ("none", "devices"):
        result = run(files, tmp_path / name, "--shard", name)
        assert result.exit_code == 0, result.output
    assert placed == [{}, {"device_map": "auto"}]
    assert losses(tmp_path / "devices") == losses(tmp_path / "none")
