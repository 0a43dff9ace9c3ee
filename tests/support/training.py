"""What tests of texts and of training share: a tokenizer of words, texts, and the command."""

import gzip
import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch
from transformers import TrainingArguments
from typer.testing import CliRunner

from specdec.cli.app import app
from specdec.data.texts import Text
from specdec.heads.eagle3.checkpoint import load
from specdec.training.run_folder import RunFolder
from specdec.training.teacher.target_logits import TargetLogits
from tests.support import tiny

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> \n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WORDS = ["<unk>", "<end>", "<user>", "<assistant>", "<system>", *"abcdefghijklmnopqrstuvwxyz"]
SMALL = "--draft-vocab 30 --steps 3 --length 40 --epochs 2 --batch-size 2 --held-out 2 --save-every 2 --device cpu"


def written(path, *entries):
    lines = [entry if isinstance(entry, str) else json.dumps(entry) for entry in entries]
    content = "\n".join(lines).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def words(tokenizer, ids):
    return " ".join(tokenizer.convert_ids_to_tokens(ids.tolist()))


def some_texts(target, count=6, new_tokens=20):
    """Texts that the target wrote itself, of different lengths."""
    out = []
    for i in range(count):
        prompt = tiny.prompts(4 + i, seed=i)["input_ids"]
        ids = target.generate(prompt, do_sample=False, max_new_tokens=new_tokens)[0]
        out.append(Text(ids, torch.arange(len(ids)) >= prompt.shape[1]))
    return out


def quiet_arguments(folder, epochs, logging_steps):
    """Of a trainer whose runs are short, and leave no checkpoints."""
    return TrainingArguments(
        str(folder),
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        num_train_epochs=epochs,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        save_strategy="no",
        logging_steps=logging_steps,
    )


def target_logits_of(target, head):
    """What `Objective` takes of a target for a head."""
    return target.get_input_embeddings().weight, TargetLogits.of(target, head.draft_to_target)


def batch_of(target, ids, learn, states, documents=None):
    """What `Objective` takes of texts (B, T)."""
    documents = torch.zeros_like(ids) if documents is None else documents
    return ids, learn, documents, states, TargetLogits.of(target).over_all(states, learn)


def arguments(files, out, *options):
    return ["train", str(files / "model"), str(files / "data.jsonl"), str(out), *SMALL.split(), *options]


def run(files, out, *options):
    return CliRunner().invoke(app, arguments(files, out, *options))


def process(command, **environment):
    threads = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, *command],
        env=os.environ | threads | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Of tests that run in a shell's background, where SIGINT is ignored, and so would be by what they start.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )


def logged(out):
    """Of all updates, by the newest checkpoint."""
    state = json.loads((Path(RunFolder(out).last_checkpoint()) / "trainer_state.json").read_text())
    return [entry for entry in state["log_history"] if "loss" in entry]


def losses(out):
    return [(entry["step"], entry["loss"]) for entry in logged(out)]


def same_heads(one, two):
    one, two = load(one / "head").state_dict(), load(two / "head").state_dict()
    return all(torch.equal(one[name], two[name]) for name in one)
