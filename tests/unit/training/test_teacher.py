"""What training asks of a target: the same of one that is loaded, of one on several devices, and of one on the disk."""

import copy
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from specdec.data.packed_dataset import PackedTexts, collate
from specdec.heads.eagle3.checkpoint import load
from specdec.training import preparation
from specdec.training.initialization.eagle3 import initialize
from specdec.training.teacher.base import LocalTeacher
from specdec.training.teacher.cached import CachedTeacher, save_teacher
from specdec.training.trainer import HeadTrainer
from tests.distributed.test_device_maps import PLACES, folder, target_of  # noqa: F401 (a fixture)
from tests.support import tiny
from tests.support.training import losses, quiet_arguments, run, some_texts

TAPS = (1, 2, 3)
FAMILIES = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "phi": {},
    "granite": {"logits_scaling": 4.0},
    "gemma2": {"head_dim": 8, "final_logit_softcapping": 9.0},
}


def interrupted(files, out, *options):
    """A run that was stopped when its states were on the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specdec.training.run._trainer", lambda *rest: 1 / 0)
        assert "unexpected error, ZeroDivisionError" in run(files, out, *options).output


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_states_on_the_disk_train_the_same_head_without_the_target(files, tmp_path, monkeypatch, kind):
    options, load = ["--cache-states", "--kind", kind], preparation.load_model
    assert run(files, tmp_path / "whole", *options).exit_code == 0
    interrupted(files, tmp_path / "cached", *options)
    loaded = []
    monkeypatch.setattr(preparation, "load_model", lambda name: loaded.append(name) or load(name))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specdec.training.evaluation_callback.evaluate", lambda *rest, **more: 1 / 0)
        assert "unexpected error, ZeroDivisionError" in run(files, tmp_path / "cached", *options).output
    assert loaded == [str(files / "model")]  # behind the last update, to decode
    assert len(losses(tmp_path / "cached")) > 3
    result = run(files, tmp_path / "cached", *options)
    assert result.exit_code == 0, result.output
    assert "the target is loaded for decoding only" in result.output.replace("\n", " ")
    assert losses(tmp_path / "cached") == losses(tmp_path / "whole")
    one, two = (load_file(tmp_path / name / "head" / "model.safetensors") for name in ("whole", "cached"))
    assert all(torch.equal(one[name], two[name]) for name in one | two)


@pytest.mark.slow
def test_without_the_decoder_the_loss_on_held_out_texts_decides(files, tmp_path, monkeypatch):
    """And the target, once its states are there, is not needed again."""
    measured = HeadTrainer.held_out

    def rising(trainer, rows, *more):
        """As of a head that learns by heart what it is taught: behind update 6 each one does harm."""
        found = measured(trainer, rows, *more)
        return found | {"eval_loss": found["eval_loss"] + max(0, trainer.state.global_step - 6)}

    monkeypatch.setattr(HeadTrainer, "held_out", rising)
    options = ["--cache-states", "--evaluate-every", "0"]
    interrupted(files, tmp_path, *options)
    monkeypatch.setattr(preparation, "load_model", lambda name: 1 / 0)
    result = run(files, tmp_path, *options)
    assert result.exit_code == 0, result.output
    assert "states are read from" in result.output
    assert "the target is loaded" not in result.output.replace("\n", " ")
    evaluation = json.loads((tmp_path / "evaluation.json").read_text())
    lowest = min((entry["eval_loss"], entry["step"]) for entry in evaluation["log"] if "eval_loss" in entry)
    assert lowest[1] == 6 < evaluation["log"][-1]["step"]
    assert (evaluation["best"]["eval_loss"], evaluation["best_update"]) == lowest
    assert f"held-out texts: loss {lowest[0]:.3f}" in result.output
    assert load(tmp_path / "head").draft_to_target.shape == (30,)
    kept = (tmp_path / "head" / "model.safetensors").stat().st_mtime_ns
    assert run(files, tmp_path, *options).exit_code == 0  # everything is done: nothing changes
    assert (tmp_path / "head" / "model.safetensors").stat().st_mtime_ns == kept
    (tmp_path / "evaluation.json").unlink()
    result = run(files, tmp_path, *options)  # what was reached is measured again
    assert "held-out texts: loss" in result.output, result.output


def test_a_target_that_changed_beside_its_states_is_said(files, tmp_path):
    shutil.copytree(files / "model", tmp_path / "model")
    (tmp_path / "data.jsonl").write_text((files / "data.jsonl").read_text())
    interrupted(tmp_path, tmp_path / "out", "--cache-states")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.01)
    model.save_pretrained(tmp_path / "model")
    result = run(tmp_path, tmp_path / "out", "--cache-states")
    assert result.exit_code == 2
    assert "are not those whose states are next to" in result.output.replace("\n", " ")


@pytest.mark.slow
def test_a_folder_without_what_is_needed_beside_its_states_gets_it(files, tmp_path):
    """As earlier versions left theirs."""
    assert run(files, tmp_path / "out", "--cache-states").exit_code == 0
    states = tmp_path / "out" / "states"
    (states / "teacher.safetensors").unlink()
    shutil.rmtree(states / "held_out")
    shutil.rmtree(tmp_path / "out" / "start")
    written = (states / "states-00000.safetensors").stat().st_mtime_ns
    result = run(files, tmp_path / "out", "--cache-states")
    assert result.exit_code == 0, result.output
    assert (states / "teacher.safetensors").exists()
    assert (states / "states-00000.safetensors").stat().st_mtime_ns == written


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_kept_is_what_the_target_says(family, normed, tmp_path):
    """Scaled embeddings and logits, a cap, a bias, an embedding that is the LM head."""
    target = tiny.randomised(AutoConfig.for_model(family, **tiny.BASE | FAMILIES[family] | {"num_hidden_layers": 4}))
    local = LocalTeacher(target, TAPS, normed=normed)
    save_teacher(local, tmp_path / "states" / "teacher.safetensors")
    cached = CachedTeacher(tmp_path / "states" / "teacher.safetensors", local.model)
    assert (cached.fingerprint, cached.taps, cached.name) == (local.fingerprint, local.taps, local.name)
    assert torch.equal(cached.embedding, local.embedding)
    state = torch.randn(5, local.logits.weight.shape[-1])
    assert torch.equal(cached.logits(state), local.logits(state))
    assert cached.model() is local.model()
    batch = collate(list(PackedTexts(some_texts(local.model(), 2), 60)))
    with pytest.raises(ValueError, match="states are missing"):
        cached.states(batch)
    assert cached.states(local.states(batch))["states"].shape[-1] == 4 * state.shape[-1]


@pytest.mark.parametrize("kind", [*PLACES, "dispatched"])
def test_a_target_on_several_devices_says_the_same(folder, kind):  # noqa: F811
    """And one whose weights come from the disk for each pass."""
    whole = LocalTeacher(tiny.model("llama", num_hidden_layers=4), TAPS)
    parts = LocalTeacher(target_of(folder, kind), TAPS)
    assert parts.fingerprint == whole.fingerprint
    assert torch.equal(parts.embedding, whole.embedding)
    assert torch.equal(parts.logits.weight, whole.logits.weight)
    batch = collate(list(PackedTexts(some_texts(whole.model(), 3), 60)))
    ours, theirs = parts.states(batch), whole.states(batch)
    for name in ("states", "over_all"):
        torch.testing.assert_close(ours[name], theirs[name])


def quantised(kind, place):
    """By torchao, or in 4 bits by bitsandbytes, which takes no rows shorter than 64."""
    whole = tiny.model("llama", num_hidden_layers=4, hidden_size=64, intermediate_size=128)
    if kind == "bitsandbytes":
        pytest.importorskip("bitsandbytes")
        whole.save_pretrained(place)
        settings = BitsAndBytesConfig(load_in_4bit=True)
        return AutoModelForCausalLM.from_pretrained(
            place, quantization_config=settings, dtype=torch.float32, device_map="cpu"
        )
    quantization = pytest.importorskip("torchao.quantization")
    eight = quantization.Int8WeightOnlyConfig()
    four = quantization.IntxWeightOnlyConfig(torch.int4, quantization.PerGroup(16))
    target = copy.deepcopy(whole)
    quantization.quantize_(target, eight if kind == "torchao, 8 bits" else four)
    return target


@pytest.mark.parametrize(
    "kind",
    ["torchao, 8 bits", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("torchao, 4 bits", "bitsandbytes"))],
)
def test_a_quantised_target_teaches(kind, tmp_path):
    """What it multiplies by is asked of its layers, whatever they store."""
    target = quantised(kind, tmp_path / "model")
    head = initialize(target, torch.arange(30))
    attention = target.model.layers[-1].self_attn
    state = torch.randn(5, 64)
    ours = head.layers[-1].self_attn.q_proj(torch.cat([state, state], -1))
    theirs = attention.q_proj(state)
    assert (ours - theirs).norm() < 0.01 * theirs.norm()  # bitsandbytes multiplies in bfloat16
    teacher = LocalTeacher.of(target, head)
    torch.testing.assert_close(teacher.logits(state), target.lm_head(state).float(), rtol=1e-4, atol=1e-5)
    save_teacher(teacher, tmp_path / "teacher.safetensors")
    rows = PackedTexts(some_texts(target, 6), 60)
    trainer = HeadTrainer(head, teacher, quiet_arguments(tmp_path / "run", 30, 15), train_dataset=rows)
    trainer.train()
    first, last = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert last < first / 2
