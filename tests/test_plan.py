"""`specdec train --dry-run`: what it says a run will take, against what a run takes."""

import json
from pathlib import Path

import pytest
import torch
from accelerate import PartialState
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from specdec.data.texts import Text
from specdec.eagle3 import load
from specdec.taps import FINAL
from specdec.training import Recipe, initialize
from specdec.training.objective import Eagle3Objective
from specdec.training.plan import Arithmetic, parameters, plan
from specdec.training.run_folder import RunFolder
from specdec.training.states import states_of
from tests import tiny
from tests.training import batch_of, run, target_logits_of

TRAINED = {"draft_vocab": 30, "steps": 3, "length": 40, "epochs": 2, "batch_size": 2, "held_out": 2, "device": "cpu"}


@pytest.fixture
def unread(monkeypatch):
    """No weights may be read: a target that is planned for may be too large for the machine."""
    monkeypatch.delattr(AutoModelForCausalLM, "from_pretrained")


def size_of(folder, *names):
    return sum((folder / name).stat().st_size for name in names)


def test_it_says_what_a_run_then_takes(files, tmp_path):
    """Parameters, updates, and the size of every file."""
    out = tmp_path / "out"
    planned = plan(Recipe(str(files / "model"), files / "data.jsonl", out, cache_states=True, **TRAINED))
    assert not out.exists()
    assert run(files, out, "--cache-states").exit_code == 0
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
        assert planned.disk[what] == pytest.approx(size, rel=0.1, abs=30_000), what  # names and shapes are in it, too


def test_the_command_reads_no_weights_and_writes_nothing(files, tmp_path, unread):
    said = run(files, tmp_path / "out", "--dry-run")
    assert said.exit_code == 0, said.output
    assert "memory, on cpu" in said.stdout
    assert "the target's states" not in said.stdout.partition("disk")[2]  # without --cache-states none are kept
    assert not (tmp_path / "out").exists()
    refused = run(files, tmp_path / "out", "--dry-run", "--length", "100000")
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


@pytest.mark.parametrize("rows", [1, 3])
def test_what_the_head_keeps_and_computes_is_counted(rows, tmp_path):
    """As in a real pass over rows in which every token is learnt."""
    target = tiny.model("llama", num_hidden_layers=4)
    T, steps = 48, 3
    ids = torch.randint(1, tiny.VOCAB, (rows, T))
    head = initialize(target, 30, tap_ids=(1, 2, 3)).float().requires_grad_(True)
    texts = [Text(row, torch.ones(T, dtype=torch.bool)) for row in ids]
    states = torch.stack(states_of(target, (1, 2, 3, FINAL), texts)).float()
    objective = Eagle3Objective(head, *target_logits_of(target, head), steps=steps)
    batch = batch_of(target, ids, torch.ones_like(ids, dtype=torch.bool), states)
    kept = {}

    def keep(tensor):
        if not isinstance(tensor, torch.nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = objective(*batch)["loss"]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        objective(*batch)
    assert loss.isfinite()
    recipe = Recipe("", tmp_path, tmp_path, length=T, batch_size=rows, steps=steps)
    counted = Arithmetic(recipe, target, head.config, texts, PartialState(cpu=True))
    assert counted.kept_for_gradients() == pytest.approx(sum(kept.values()), rel=0.1)
    K, H = 30, target.config.hidden_size
    logits = 2 * K * H * rows * T * (1 + 3 * steps)
    assert rows * counted.forward_work() + logits == pytest.approx(counter.get_total_flops(), rel=0.1)
