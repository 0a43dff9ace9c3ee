"""`specdec train`: heads that draft, what is said on the way, and what is refused."""

import json
import re
import shutil
import weakref
from copy import deepcopy
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.utils import logging
from typer.testing import CliRunner

from specdec import Eagle3Proposer, SpeculativeGenerator
from specdec.cli.app import app
from specdec.data.packed_dataset import PackedTexts, StateDataset
from specdec.data.texts import Text, load_texts
from specdec.heads.eagle3.checkpoint import load
from specdec.heads.eagle3.export import save
from specdec.training.initialization.draft_vocabulary import frequent_tokens, token_counts
from specdec.training.initialization.eagle3 import initialize
from specdec.training.recipe import SHARDING, Recipe
from specdec.training.run_folder import RunFolder
from specdec.training.teacher.base import LocalTeacher
from specdec.training.teacher.state_cache import extract
from specdec.training.trainer import HeadTrainer
from tests.support import blocks, eagle3, tiny
from tests.support.training import SMALL, WORDS, logged, losses, process, quiet_arguments, run, some_texts, written


@pytest.mark.slow
def test_training_makes_a_head_that_drafts(tmp_path):
    """From nothing to a head that beats what the previous token alone tells."""
    target = tiny.model("llama", num_hidden_layers=4)
    texts = some_texts(target, 16, 40)
    extract(LocalTeacher(target, (1, 2, 3)), texts, tmp_path / "states")
    counts = token_counts(texts, tiny.VOCAB)
    vocab = frequent_tokens(counts, 40)
    assert counts[vocab].sum() > 0.8 * counts.sum()
    torch.manual_seed(0)
    head = initialize(target, vocab, tap_ids=(1, 2, 3))
    args = quiet_arguments(tmp_path / "run", 400, 100)
    rows = StateDataset(tmp_path / "states", 60)
    trainer = HeadTrainer(head, LocalTeacher.of(target, head), args, steps=4, train_dataset=rows)
    trainer.train()
    trainer.save_head(tmp_path / "head")
    logged = [entry for entry in trainer.state.log_history if "simulated_length" in entry]
    assert logged[-1]["simulated_length"] > logged[0]["simulated_length"] + 1

    spec = SpeculativeGenerator(target, Eagle3Proposer(load(tmp_path / "head"), branching=(1,) * 4), draft_length=4)
    for i in range(8):
        spec.generate(tiny.prompts(4 + i, seed=i)["input_ids"], do_sample=False, max_new_tokens=40)
    follows = {}  # the bigram baseline, as generous as can be: fitted to the very texts
    for text in texts:
        for one, two in zip(text.ids.tolist(), text.ids.tolist()[1:], strict=False):
            follows.setdefault(one, []).append(two)
    total = sum(map(len, follows.values()))
    bigram = sum(max(map(seen.count, set(seen))) for seen in follows.values()) / total
    assert spec.report.conditional_acceptance_rate_per_pos[0] > bigram
    assert spec.report.mean_acceptance_length > 2.5


@pytest.mark.slow
def test_the_command_makes_a_head_that_is_ahead_of_bigrams(tokenizer, tmp_path):
    """On prompts that neither has seen, in chains of three, by the decoder."""
    target = tiny.model("llama", num_hidden_layers=4, vocab_size=len(WORDS))
    target.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    prompts = torch.randint(5, len(WORDS), (208, 10), generator=torch.manual_seed(0))
    endless = {"max_new_tokens": 40, "eos_token_id": None, "pad_token_id": 0}
    texts = target.generate(prompts, do_sample=True, top_k=0, **endless)
    lines = [{"text": " ".join(WORDS[token] for token in text)} for text in texts.tolist()]
    data = written(tmp_path / "data.jsonl", *lines[8:])
    held = written(tmp_path / "held.jsonl", *lines[:8])
    command = ["train", str(tmp_path / "model"), str(data), str(tmp_path / "out"), "--held-out-data", str(held)]
    options = f"--draft-vocab {len(WORDS)} --steps 3 --length 50 --epochs 30 --learning-rate 5e-3 --batch-size 16"
    result = CliRunner().invoke(app, [*command, *options.split(), "--cache-states", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    spec = SpeculativeGenerator(
        target, Eagle3Proposer(load(tmp_path / "out" / "head"), branching=(1,) * 3), draft_length=3
    )
    follows = [[0] * len(WORDS) for _ in WORDS]
    for text in texts[8:].tolist():
        for one, two in pairwise(text):
            follows[one][two] += 1
    rounds = accepted = 0
    for prompt in prompts[:8]:
        text = spec.generate(prompt[None], do_sample=False, **endless)[0].tolist()
        at = len(prompt)
        while at < len(text) - 3:
            taken, token = 0, text[at]
            while taken < 3 and (token := follows[token].index(max(follows[token]))) == text[at + 1 + taken]:
                taken += 1
            rounds, accepted, at = rounds + 1, accepted + taken, at + 1 + taken
    assert spec.report.mean_acceptance_length > 1 + accepted / rounds + 0.2


@pytest.mark.slow
def test_states_computed_on_the_way_train_the_same_head(files, tmp_path):
    """Up to the rounding of cached states to bfloat16."""
    for name, options in {"cached": ["--cache-states"], "online": []}.items():
        assert run(files, tmp_path / name, *options).exit_code == 0
    cached, online = losses(tmp_path / "cached"), losses(tmp_path / "online")
    assert [step for step, _ in cached] == [step for step, _ in online]
    assert [loss for _, loss in online] == pytest.approx([loss for _, loss in cached], rel=0.02)


@pytest.mark.slow
def test_two_processes_have_the_loss_curve_of_one(files, tmp_path):
    """Also if they are out of time in between, and where one has more to learn from than the other; and if another
    number of processes goes on."""
    lines = (files / "data.jsonl").read_text().splitlines()
    short = [{"prompt": "a b c d e f g h i j k l", "response": letter} for letter in "mnopqrst"]
    data = written(tmp_path / "data.jsonl", *(entry for pair in zip(lines, short, strict=False) for entry in pair))
    longer = ["--epochs", "15", "--length", "20"]

    def train(out):
        return ["train", str(files / "model"), str(data), str(tmp_path / out), *SMALL.split(), *longer]

    assert CliRunner().invoke(app, train("one")).exit_code == 0
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    for minutes, said in (("0", "time is up at update 2 of "), ("9", "the head is in")):
        command = [*launch, "-m", "specdec", *train("two"), "--max-minutes", minutes]
        both = process(command, ACCELERATE_USE_CPU="true")
        output, _ = both.communicate(timeout=240)
        assert both.returncode == 0, output
        assert said in output
        if minutes == "0":
            shutil.copytree(tmp_path / "two", tmp_path / "two, then one")
    assert CliRunner().invoke(app, train("two, then one")).exit_code == 0
    assert (Path(RunFolder(tmp_path / "two").last_checkpoint()) / "rng_state_1.pth").exists()  # there were two
    one = losses(tmp_path / "one")
    assert len(one) > 5
    for name in ("two", "two, then one"):
        found = losses(tmp_path / name)
        assert [step for step, _ in found] == [step for step, _ in one]
        # Rounding, by another order of sums, grows from update to update: 2e-4 in the mean, 1e-3 at the worst of 52.
        off = [abs(loss / right - 1) for (_, loss), (_, right) in zip(found, one, strict=True)]
        assert off[0] < 1e-6
        assert sum(off) / len(off) < 5e-4
        assert max(off) < 2e-3


@pytest.mark.parametrize("kind", ["eagle3", pytest.param("dspark", marks=pytest.mark.slow)])
def test_unequal_passes_of_an_update_have_the_gradient_of_one(kind, tmp_path):
    """Whatever each has to learn from: the loss is per token of the update."""
    target = tiny.model("llama", num_hidden_layers=4)
    texts = [
        Text(text.ids, text.learn & (torch.arange(len(text.ids)) >= 3 * i)) for i, text in enumerate(some_texts(target))
    ]
    assert len({int(text.learn.sum()) for text in texts}) > 3
    start = eagle3.head() if kind == "eagle3" else blocks.head("DSpark", **blocks.OWN)
    trained, logs, teacher = [], [], LocalTeacher.of(target, start)
    for at_once in (2, 1):
        args = quiet_arguments(tmp_path, 1, 1)
        args.per_device_train_batch_size, args.gradient_accumulation_steps = at_once, 2 // at_once
        args.optim, args.learning_rate, args.max_grad_norm = "sgd", 0.5, 0.0
        trainer = HeadTrainer(deepcopy(start), teacher, args, train_dataset=PackedTexts(texts, 20))
        trainer.train()
        trained.append(trainer.head.state_dict())
        logs.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(logs[0]) == 3
    assert logs[1] == pytest.approx(logs[0], rel=1e-3)
    for name, weight in trained[0].items():
        torch.testing.assert_close(trained[1][name], weight, rtol=1e-3, atol=1e-6)
    assert any(not torch.equal(weight, start.state_dict()[name]) for name, weight in trained[0].items())


@pytest.mark.slow
@pytest.mark.parametrize("step_weights", ["decay", "d-pace"])
def test_rows_in_several_passes_train_the_same_head(step_weights, files, tmp_path):
    for name, at_once in (("two", "2"), ("one", "1")):
        options = ["--rows-at-once", at_once, "--epochs", "8", "--step-weights", step_weights]
        assert run(files, tmp_path / name, *options).exit_code == 0
    one, two = ([loss for _, loss in losses(tmp_path / name)] for name in ("one", "two"))
    assert len(one) > 2
    assert one == pytest.approx(two, rel=1e-3)


def test_a_run_may_begin_with_fewer_steps(tmp_path):
    """In its first half; what is held out is measured over all of them at any time."""
    target, head = tiny.model("llama", num_hidden_layers=4), eagle3.head()
    rows, teacher = PackedTexts(some_texts(target), 60), LocalTeacher.of(target, head)
    measured = []
    for begin_with in (None, 2):
        args = quiet_arguments(tmp_path, 4, 1)
        trainer = HeadTrainer(deepcopy(head), teacher, args, begin_with=begin_with, train_dataset=rows)
        trainer.objective.steps = begin_with or 3
        measured.append(trainer.held_out(rows))
    assert measured[0] == measured[1]
    trainer.train()
    logged = [sum(name.startswith("accuracy_") for name in entry) for entry in trainer.state.log_history]
    assert logged[:-1] == [2, 2, 3, 3]


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_a_head_is_saved_beside_files_of_others(kind, tmp_path):
    target = tiny.model("llama", num_hidden_layers=4)
    head = eagle3.head() if kind == "eagle3" else blocks.head("DSpark", **blocks.OWN)
    args = quiet_arguments(tmp_path / "run", 1, 1)
    trainer = HeadTrainer(head, LocalTeacher.of(target, head), args, train_dataset=PackedTexts(some_texts(target), 60))
    mine = [tmp_path / name / "notes.txt" for name in ("head", "head.part", "head.old")]
    for path in mine:
        path.parent.mkdir()
        path.write_text("mine")
    for _ in range(2):
        trainer.save_head(tmp_path / "head")
    assert all(path.read_text() == "mine" for path in mine)
    saved = {"config.json", "model.safetensors"}
    assert {path.name for path in (tmp_path / "head").iterdir()} == {"notes.txt", *saved}
    target.save_pretrained(tmp_path / "model")
    before = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    with pytest.raises(ValueError, match="choose another folder"):
        trainer.save_head(tmp_path / "model")
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == before


def test_states_of_few_held_out_rows_are_in_memory_at_a_time(tmp_path):
    target, head = tiny.model("llama", num_hidden_layers=4), eagle3.head()
    teacher, alive, most = LocalTeacher.of(target, head), [], 0

    class Watched(PackedTexts):
        def __getitem__(self, index):
            nonlocal most
            row = super().__getitem__(index)
            alive[:] = [one for one in alive if one() is not None]
            most = max(most, len(alive))
            row["states"] = torch.zeros(len(row["ids"]), 1)
            alive.append(weakref.ref(row["states"]))
            return row

    rows = Watched(some_texts(target), 20)
    args = quiet_arguments(tmp_path, 1, 1)
    args.per_device_train_batch_size = 1
    trainer = HeadTrainer(head, teacher, args, train_dataset=rows)
    trainer.teacher = SimpleNamespace(
        states=lambda batch: teacher.states({k: v for k, v in batch.items() if k != "states"})
    )
    trainer.held_out(rows)
    assert len(rows) > 4
    assert most <= 2


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_the_held_out_loss_is_that_of_learning(kind, tmp_path):
    """However many rows a pass takes, and though it was learnt from others before."""
    target = tiny.model("llama", num_hidden_layers=4)
    texts = some_texts(target)
    head = eagle3.head() if kind == "eagle3" else blocks.head("DSpark", **blocks.OWN)
    rows, found, teacher = PackedTexts(texts[:3], 60), [], LocalTeacher.of(target, head)
    for at_once in (3, 1):
        args = quiet_arguments(tmp_path, 1, 1)
        args.per_device_train_batch_size = at_once
        trainer = HeadTrainer(deepcopy(head), teacher, args, state_weight=0.0, train_dataset=rows)
        trainer.objective.state_weight, trainer.objective.update = 1.0, 7  # as in the middle of a run
        found.append(trainer.held_out(rows))
        trainer = HeadTrainer(deepcopy(head), teacher, args, step_weights="d-pace", train_dataset=rows)
        trainer.objective.by_acceptance = True  # again in the middle of a run
        assert trainer.held_out(rows) == found[-1]
    assert len(rows) > 1
    assert found[1] == pytest.approx(found[0], rel=1e-3)
    args = quiet_arguments(tmp_path, 1, 1)
    trainer = HeadTrainer(deepcopy(head), teacher, args, state_weight=0.0, train_dataset=rows)
    trainer.train()
    first = trainer.state.log_history[0]
    assert found[0]["eval_loss"] == pytest.approx(first["loss"], rel=1e-3)
    assert found[0]["eval_simulated_length"] == pytest.approx(first["simulated_length"], rel=1e-3)


def test_a_loss_that_is_not_a_number_ends_training(files, tmp_path, monkeypatch):
    def broken(self, ids, **kwargs):
        return {"loss": torch.nan * self.head.fc.weight.sum(), "accuracy": torch.ones(3)}

    monkeypatch.setattr("specdec.training.objectives.eagle3.Objective.forward", broken)
    result = run(files, tmp_path)
    assert result.exit_code == 2
    assert "the loss is nan at update 0: try a lower learning rate" in result.output


@pytest.mark.parametrize(
    "verbosity",
    [logging.WARNING, pytest.param(logging.ERROR, marks=pytest.mark.slow)],
    ids=["with a bar", "without"],
)
def test_what_training_says_on_the_way(files, tmp_path, request, verbosity):
    request.addfinalizer(partial(logging.set_verbosity, logging.get_verbosity()))
    logging.set_verbosity(verbosity)  # above warnings there is no bar
    result = run(files, tmp_path, "--epochs", "2")
    assert result.exit_code == 0, result.output
    lines = result.output.replace("\r", "\n").splitlines()
    assert any(re.search(r"the target reads in \w+, the head is trained in \w+", line) for line in lines)
    assert any(re.search(r"update 10: loss \d+\.\d+, first choices right( \d\.\d\d){3} ", line) for line in lines)
    held = r"held-out texts: loss \d+\.\d+, simulated length \d\.\d\d"
    assert any(re.search(rf"update 2: {held}", line) for line in lines)
    # The held-out loss is measured after the checkpoint, so a line has that of the checkpoint before.
    assert any(re.search(rf"update 10: loss .* \(step by step\); {held} at update 8", line) for line in lines)
    assert any(re.search(r"update 10: accepted per round \d\.\d\d tokens with trees at T=0", line) for line in lines)


@pytest.mark.slow
def test_a_short_run_is_warmed_up_in_time(files, tmp_path):
    """Its learning rate rises for a share of its updates: ten of them come near to what was asked for."""
    assert run(files, tmp_path).exit_code == 0
    assert max(entry["learning_rate"] for entry in logged(tmp_path)) > 0.9 * Recipe.learning_rate


@pytest.mark.slow
def test_trackers_are_sent_what_is_logged(files, tmp_path, monkeypatch):
    sent = []

    class Tracker(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            sent.append(set(logs))

    monkeypatch.setattr("specdec.training.recipe.get_available_reporting_integrations", lambda: ["wandb"])
    monkeypatch.setitem(INTEGRATION_TO_CALLBACK, "wandb", Tracker)
    result = run(files, tmp_path / "out", "--report-to", "wandb")
    assert result.exit_code == 0, result.output
    for keys in ({"loss", "simulated_length", "learning_rate"}, {"decoder_tree_length"}):
        assert any(keys <= one for one in sent)


def test_a_tracker_that_is_missing_is_said_before_any_work(files, tmp_path, monkeypatch):
    monkeypatch.setattr("specdec.training.recipe.get_available_reporting_integrations", lambda: ["wandb"])
    result = run(files, tmp_path / "out", "--report-to", "tensorboard")
    assert result.exit_code == 2
    assert "pip install tensorboard" in result.output.replace("\n", " ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", SHARDING)
def test_sharding_the_head_is_refused(files, tmp_path, monkeypatch, kind):
    monkeypatch.setenv(SHARDING[kind], "true")
    result = run(files, tmp_path / "out")
    assert result.exit_code == 2
    assert f"not with {kind}" in result.output
    assert not (tmp_path / "out").exists()


def test_rows_that_cannot_be_divided(files, tmp_path):
    result = run(files, tmp_path / "out", "--batch-size", "5", "--rows-at-once", "2")
    assert result.exit_code == 2
    assert "choose a multiple" in result.output
    assert not (tmp_path / "out").exists()  # a corrected command is not refused


def test_texts_to_evaluate_on_may_be_a_file_of_their_own(files, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "specdec.training.run.EvaluationCallback", lambda trainer, prompts, *rest, **more: seen.append(prompts) or 1 / 0
    )
    held = written(tmp_path / "held.jsonl", {"text": "a b c d e f g h"}, {"prompt": "z", "response": "y x"})
    result = run(files, tmp_path / "out", "--held-out-data", str(held), "--held-out", "50")
    assert "unexpected error, ZeroDivisionError" in result.output
    assert [len(prompt) for prompt in seen[0]] == [2, 4]
    assert len(load_texts(tmp_path / "out" / "texts.safetensors")) == 12  # all


def test_texts_both_learnt_and_evaluated_on_are_said(files, tmp_path, monkeypatch):
    monkeypatch.setattr("specdec.training.run.EvaluationCallback", lambda *rest, **more: 1 / 0)
    options = ["--held-out-data", str(files / "data.jsonl")]
    with pytest.warns(UserWarning, match="12 of the 12 texts to evaluate on are also trained on"):
        run(files, tmp_path / "out", *options)
    again = run(files, tmp_path / "out", "--held-out", "1")
    assert "(held_out was a file of its own, is 1)" in again.output.replace("\n", " ")


def test_copies_of_held_out_texts_are_said(files, tmp_path, monkeypatch):
    monkeypatch.setattr("specdec.training.run.EvaluationCallback", lambda *rest, **more: 1 / 0)
    data = written(tmp_path / "data.jsonl", *[{"text": "a b c d e f g h"}] * 4)
    command = ["train", str(files / "model"), str(data), str(tmp_path / "out"), *SMALL.split(), "--held-out", "1"]
    with pytest.warns(UserWarning, match="1 of the 1 texts to evaluate on are also trained on.*remove repeated texts"):
        CliRunner().invoke(app, command)


def test_rows_longer_than_the_target_reads_are_refused(files, tmp_path):
    shutil.copytree(files / "model", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 39}))
    command = ["train", str(tmp_path / "model"), str(files / "data.jsonl"), str(tmp_path / "out"), *SMALL.split()]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert "reads 39 tokens at most" in result.output.replace("\n", " ")


def test_texts_up_to_the_end_of_what_the_target_reads(tokenizer, tmp_path):
    """Where positions are learnt, one more is an IndexError."""
    target = tiny.model("gpt2", n_positions=32, n_layer=4)
    target.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    entries = [{"prompt": "a b " * 14, "response": "c d e"} for _ in range(6)]
    data = written(tmp_path / "data.jsonl", *entries)
    command = ["train", str(tmp_path / "model"), str(data), str(tmp_path / "out"), *SMALL.split(), "--length", "32"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    prompts = written(tmp_path / "prompts.jsonl", {"prompt": "a " * 8}, {"prompt": "a " * 22})
    command = ["regenerate", str(tmp_path / "model"), str(prompts), str(tmp_path / "answers.jsonl")]
    with pytest.warns(UserWarning, match="1 of 2 conversations were left out:\n  .*line 2: .* longer than 16 tokens"):
        result = CliRunner().invoke(app, [*command, "--max-new-tokens", "16"])
    assert result.exit_code == 0, result.output
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 1
    command[-1] = str(tmp_path / "others.jsonl")
    result = CliRunner().invoke(app, [*command, "--max-new-tokens", "32"])
    assert result.exit_code == 2
    assert "leaves no space for a prompt in the 32 tokens" in result.output.replace("\n", " ")


def test_too_few_texts(files, tmp_path):
    result = run(files, tmp_path, "--held-out", "50")
    assert result.exit_code == 2
    assert "none is left" in result.output


def test_texts_that_hold_nothing_are_named_before_the_target_is_loaded(files, tmp_path, monkeypatch):
    monkeypatch.setattr("specdec.training.preparation.load_model", lambda *rest, **more: 1 / 0)
    target, data = str(files / "model"), written(tmp_path / "data.jsonl", *[{"text": ""}, "[]"] * 4)
    command = ["train", target, str(data), str(tmp_path / "out"), *SMALL.split()]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert re.search(r"none of 8 texts can be used:\s.*line 1: the tokenizer returns no tokens for it", result.output)
    written(data, *[{"text": ""}, {"text": "a b c"}] * 4)
    with pytest.warns(UserWarning, match=r"3 of 6 texts were left out:\n  .*line 1: .*\n  .*line 3: "):
        result = CliRunner().invoke(app, [*command, "--max-texts", "3"])
    assert "unexpected error, ZeroDivisionError" in result.output
    assert len(load_texts(tmp_path / "out" / "texts.safetensors")) == 1  # two are held out


@pytest.mark.slow
def test_the_probe_says_when_hardly_anything_is_accepted(files, tmp_path):
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_pretrained(files / "model")
    head = initialize(target, torch.arange(20))
    with torch.no_grad():
        for weight in head.parameters():
            weight.normal_()
    save(head, tmp_path / "head")
    command = ["inspect", str(tmp_path / "head"), "--target", str(files / "model"), "--probe"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "Hardly any draft is accepted: this head belongs to another model, or was not trained." in result.output
