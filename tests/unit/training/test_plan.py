"""`specdec train --dry-run`: what it says a run will take, against what a run takes."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from accelerate import PartialState
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
from transformers import AutoModelForCausalLM

from specdec.data.texts import Text, Texts
from specdec.heads.dflash.export import save
from specdec.heads.loading import load
from specdec.models.hidden_states import FINAL
from specdec.training.initialization.dflash import initialize_block
from specdec.training.initialization.eagle3 import initialize
from specdec.training.objectives.dflash import BlockObjective
from specdec.training.objectives.eagle3 import Eagle3Objective
from specdec.training.plan import estimate, head_cost, parameters, plan
from specdec.training.recipe import Recipe
from specdec.training.run import train
from specdec.training.run_folder import RunFolder
from specdec.training.teacher.state_cache import states_of
from specdec.utils.choices import HeadKind
from tests.support import blocks, tiny
from tests.support.training import batch_of, run, target_logits_of

TRAINED = {"draft_vocab": 30, "steps": 3, "length": 40, "epochs": 2, "batch_size": 2, "held_out": 2, "device": "cpu"}

ANCHORS = 10

# torch does not count the products of attention on CPUs (2.13).
ON_CPUS = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
ATTENTION = {ON_CPUS: lambda q, k, v, *rest, **options: sdpa_flop_count(q, k, v)}

PLANNED = [kind for kind in get_args(HeadKind) if kind != "mtp"]  # that one is refused, see test_mtp_training


@pytest.fixture
def unread(monkeypatch):
    """No weights may be read: a target that is planned for may be too large for the machine."""
    monkeypatch.delattr(AutoModelForCausalLM, "from_pretrained")


def size_of(folder, *names):
    return sum((folder / name).stat().st_size for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark"])
def test_it_says_what_a_run_then_takes(files, tmp_path, kind):
    """Parameters, updates, and the size of every file."""
    out = tmp_path / "out"
    planned = plan(Recipe(str(files / "model"), files / "data.jsonl", out, kind=kind, cache_states=True, **TRAINED))
    assert not out.exists()
    assert run(files, out, "--cache-states", "--kind", kind).exit_code == 0
    folder = RunFolder(out)
    checkpoint = Path(folder.last_checkpoint())
    assert planned.target == parameters(AutoModelForCausalLM.from_pretrained(files / "model"))
    assert planned.head == parameters(load(folder.head))
    assert planned.updates == json.loads((checkpoint / "trainer_state.json").read_text())["max_steps"]
    taken = {
        "the target's states": sum(path.stat().st_size for path in folder.states.glob("*.safetensors")),
        "checkpoints": 3 * size_of(checkpoint, "model.safetensors", "optimizer.pt"),
        "the head, bfloat16": 2 * size_of(folder.head, "model.safetensors"),
    }
    assert planned.disk.keys() == taken.keys()
    for what, size in taken.items():
        assert planned.disk[what] == pytest.approx(size, rel=0.15, abs=30_000), what  # names and shapes are in it, too


@pytest.mark.slow
def test_evaluations_are_counted(files, tmp_path):
    """As many as a run then makes, and with a cost of their own."""
    options = ["--evaluate-every", "3", "--epochs", "2"]
    recipe = Recipe(str(files / "model"), files / "data.jsonl", tmp_path / "out", evaluate_every=3, **TRAINED)
    planned = plan(replace(recipe, save_every=2))
    assert run(files, tmp_path / "out", *options).exit_code == 0
    log = json.loads(RunFolder(tmp_path / "out").evaluation.read_text())["log"]
    assert planned.evaluation.texts == 2
    assert planned.evaluation.decodings == sum("decoder_texts" in entry for entry in log) > 1
    assert planned.evaluation.losses == sum("eval_rows" in entry for entry in log)
    said = planned.summary()
    assert "evaluations of 2 held-out texts take up to" in said
    assert f"by decoding: {planned.evaluation.decodings} (at" in said
    training, evaluating = planned.seconds
    assert training > 0
    assert evaluating > 0
    recipe = replace(recipe, out=tmp_path / "other")
    none = plan(replace(recipe, save_every=2, evaluate_every=0))
    assert none.evaluation.decoding == none.evaluation.decodings == 0
    assert none.evaluation.loss > 0
    more = plan(replace(recipe, held_out=4)).evaluation  # in fewer updates
    one, other = (found.decoding / found.decodings for found in (planned.evaluation, more))
    assert other == pytest.approx(2 * one, rel=0.3)


def test_a_target_that_is_run_elsewhere_takes_nothing_here(files, tmp_path, unread):
    recipe = Recipe(str(files / "model"), files / "data.jsonl", tmp_path / "out", evaluate_every=0, **TRAINED)
    here, elsewhere = plan(recipe), plan(replace(recipe, teacher="http://host:8100"))
    assert {what.split(",")[0] for what in here.memory.keys() - elsewhere.memory.keys()} == {
        "the target's weights",
        "a pass of the target over 1024 tokens",
    }
    assert here.work["the target's passes"] > elsewhere.work["the target's passes"] == 0


@pytest.mark.parametrize("kind", PLANNED)
def test_the_command_reads_no_weights_and_writes_nothing(files, tmp_path, unread, kind):
    said = run(files, tmp_path / "out", "--dry-run", "--kind", kind)
    assert said.exit_code == 0, said.output
    assert "memory, on cpu" in said.stdout
    assert "the target's states" not in said.stdout.partition("disk")[2]  # without --cache-states none are kept
    assert not (tmp_path / "out").exists()
    refused = run(files, tmp_path / "out", "--dry-run", "--kind", kind, "--length", "100000")
    assert refused.exit_code == 2


def test_a_target_of_70_billion_is_planned_for(files, tmp_path, unread):
    """Llama-3.1's shape: figures of its model card, in a process that holds none of it."""
    large = tmp_path / "large"
    large.mkdir()
    for path in (files / "model").glob("token*"):
        (large / path.name).write_bytes(path.read_bytes())
    shape = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    shape |= {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072}
    described = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", **shape}
    (large / "config.json").write_text(json.dumps(described))
    planned = plan(Recipe(str(large), files / "data.jsonl", tmp_path / "out", held_out=2, device="cpu"))
    assert planned.target == pytest.approx(70.55e9, rel=1e-3)
    weights = next(size for what, size in planned.memory.items() if what.startswith("the target's weights"))
    assert weights in (2 * planned.target, 4 * planned.target)  # where bfloat16 is emulated, in float32


def test_a_drafter_to_go_on_from_is_planned_as_it_is(files, tmp_path, unread):
    """Its own shape, whatever a fresh one's would be."""
    save(blocks.head("rnn", own_head=True, draft_vocab_size=40), tmp_path / "head")
    recipe = Recipe(str(files / "model"), files / "data.jsonl", tmp_path / "out", kind="dspark")
    planned = plan(replace(recipe, start_from=str(tmp_path / "head"), held_out=2, steps=3, length=40, device="cpu"))
    assert planned.head == parameters(load(tmp_path / "head"))


def fresh(kind, target, steps):
    """A head to train, and its objective."""
    if kind == "eagle3":
        head = initialize(target, 30, tap_ids=(1, 2, 3)).float().requires_grad_(True)
        return head, Eagle3Objective(head, *target_logits_of(target, head), steps=steps)
    head = initialize_block(target, torch.arange(30), 63, kind, steps, tap_ids=(1, 2, 3))
    return head, BlockObjective(head, *target_logits_of(target, head), steps=steps, anchors=ANCHORS)


@pytest.mark.parametrize("kind", PLANNED)
@pytest.mark.parametrize("rows", [1, 3])
def test_what_the_head_keeps_and_computes_is_counted(kind, rows, tmp_path):
    """As in a real pass over rows in which every token is learnt."""
    target = tiny.model("llama", num_hidden_layers=4)
    T, steps = 48, 3
    ids = torch.randint(1, tiny.VOCAB, (rows, T))
    head, objective = fresh(kind, target, steps)
    texts = [Text(row, torch.ones(T, dtype=torch.bool)) for row in ids]
    states = torch.stack(states_of(target, (1, 2, 3, FINAL), texts)).float()
    batch = batch_of(target, ids, torch.ones_like(ids, dtype=torch.bool), states)
    kept, weights = {}, {weight.untyped_storage().data_ptr() for weight in head.parameters()}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = objective(*batch)["loss"]
    with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter, torch.no_grad():
        objective(*batch)
    assert loss.isfinite()
    recipe = Recipe("", tmp_path, tmp_path, kind=kind, length=T, batch_size=rows, steps=steps, anchors=ANCHORS)
    planned = estimate(recipe, target, head.config, Texts.of(texts), PartialState(cpu=True))
    assert planned.memory["activations of the head kept for gradients"] == pytest.approx(sum(kept.values()), rel=0.1)
    logits = planned.work["logits of drafts and their gradients"] / recipe.epochs
    assert rows * head_cost(head.config, recipe).forward + logits == pytest.approx(counter.get_total_flops(), rel=0.1)


@pytest.mark.parametrize("function", [plan, train])
def test_a_target_without_a_tokenizer_is_named(function, files, tmp_path):
    """From Python as well as by command."""
    shutil.copytree(files / "model", tmp_path / "bare")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "bare" / name).unlink(missing_ok=True)
    with pytest.raises(ValueError, match="no tokenizer"):
        function(Recipe(str(tmp_path / "bare"), files / "data.jsonl", tmp_path / "out", **TRAINED))
