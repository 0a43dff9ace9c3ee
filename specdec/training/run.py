"""`train`: from a recipe to a trained head, in one call that goes on where an earlier one was stopped.

Owns the order of things, and what several processes share of the work.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta

from accelerate import PartialState
from rich.progress import Progress
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoTokenizer, PreTrainedModel, TrainingArguments

from specdec.capability import capability
from specdec.data.texts import Text, keep
from specdec.proposers.draft_model import load as load_model
from specdec.taps import decoder_layers
from specdec.training import precision
from specdec.training.corpus import checksum_of_entries, corpus
from specdec.training.dataset import PackedTexts, StateDataset
from specdec.training.deadline import Deadline
from specdec.training.eight_bits import in_eight_bits
from specdec.training.evaluation import Evaluation
from specdec.training.evaluation_callback import EvaluationCallback
from specdec.training.progress import in_bytes, speak
from specdec.training.recipe import Recipe
from specdec.training.run_folder import RunFolder
from specdec.training.starting_head import given_head, starting_head
from specdec.training.states import bytes_per_token, extract
from specdec.training.teacher import fingerprint
from specdec.training.trainer import STATE_WEIGHT, Head, HeadTrainer

LOG_EVERY = 10  # updates
WARM_UP = 0.04  # of all updates: 20 of them would be half of a short run


def train(recipe: Recipe) -> Evaluation | None:
    """Extract, train, evaluate; everything in `recipe.out`, the best head in its `head`. None if time was up before."""
    started = time.monotonic()
    folder, processes = checked(recipe)
    folder.path.mkdir(parents=True, exist_ok=True)
    deadline = None if recipe.max_minutes is None else started + 60 * recipe.max_minutes
    with folder.alone() if processes.is_main_process else nullcontext():
        return _train(recipe, folder, processes, deadline)


def checked(recipe: Recipe) -> tuple[RunFolder, PartialState]:
    """Where a run lies, and its processes; ValueError for what can be refused before anything is read."""
    folder = RunFolder(recipe.out)
    recipe.check()
    folder.check()
    processes = PartialState(cpu=recipe.device == "cpu", timeout=timedelta(days=1))  # who is done waits
    recipe.per_pass(processes)
    return folder, processes


def _train(recipe: Recipe, folder: RunFolder, processes: PartialState, deadline: float | None) -> Evaluation | None:
    given = given_head(recipe)
    tokenizer = AutoTokenizer.from_pretrained(recipe.target)
    checksum = checksum_of_entries(recipe)
    learnt, held_out = corpus(recipe, folder, tokenizer, checksum)
    target = precision.as_fast_as_it_reads(load_model(recipe.target).to(processes.device))
    if capability(target).masks is None:
        raise ValueError(f"{recipe.target} cannot be decoded speculatively: {capability(target).reason}")
    weights = fingerprint(target)
    identity = recipe.identity(checksum, weights)
    folder.refuse_others(identity, recipe.defaults() | {"weights": weights})
    head = starting_head(recipe, given, target, learnt, folder, processes)
    if processes.is_main_process:
        print(precision.in_words(target))
        keep(learnt, folder.learnt)
        keep(held_out, folder.held_out)
        folder.claim(identity)
    dataset: Dataset = PackedTexts(learnt, recipe.length)
    if recipe.cache_states:
        reader = in_eight_bits(target, learnt[0].ids) if recipe.rounded_states else target
        _extract(reader, head, learnt, folder, processes, deadline)
        processes.wait_for_everyone()
        if not (folder.states / "states.json").exists():
            return None
        dataset = StateDataset(folder.states, recipe.length)
    trainer = _trainer(recipe, folder, head, target, dataset, processes)
    prompts = [_prompt(text) for text in held_out]
    evaluation = EvaluationCallback(
        trainer,
        prompts,
        folder,
        every=recipe.evaluate_every,
        held_out=PackedTexts(held_out, recipe.length),
        held_out_every=recipe.save_every,
        at_start=recipe.start_from is not None,
    )
    trainer.add_callback(evaluation)
    if deadline is not None:
        trainer.add_callback(Deadline(deadline))
    with folder.clear_failures("use fewer --rows-at-once"):
        trainer.train(resume_from_checkpoint=folder.last_checkpoint())
    if trainer.state.global_step < trainer.state.max_steps:
        return None
    trainer.accelerator.wait_for_everyone()  # one process evaluates
    return evaluation.best()


def _extract(
    target: PreTrainedModel,
    head: Head,
    texts: Sequence[Text],
    folder: RunFolder,
    processes: PartialState,
    deadline: float | None,
) -> None:
    """The processes of a machine, which have one disk, share the work; the first shows how far it is with its own."""
    first, count = processes.is_local_main_process, int(os.environ.get("LOCAL_WORLD_SIZE", processes.num_processes))
    taps = head.config.taps(len(decoder_layers(target)))
    tokens = sum(len(text.ids) for text in texts)
    done = sum(path.stat().st_size for path in folder.states.glob("states-*.safetensors"))
    size, free = tokens * bytes_per_token(target, taps), shutil.disk_usage(folder.path).free
    if first:
        print(f"{len(texts)} texts, {tokens} tokens; their states take {in_bytes(size)} in {folder.states}")
    if size - done > 0.95 * free:
        raise ValueError(f"{in_bytes(size)} of states do not fit on the disk, {in_bytes(free)} are free")
    with Progress(disable=not first) as bar, folder.clear_failures("use a shorter --length"):
        task = bar.add_task("states", total=tokens / count)
        extract(
            target,
            texts,
            taps,
            folder.states,
            share=(processes.local_process_index, count),
            progress=lambda done: bar.advance(task, done),
            go_on=lambda: deadline is None or time.monotonic() < deadline,
        )


def _trainer(
    recipe: Recipe,
    folder: RunFolder,
    head: Head,
    target: PreTrainedModel,
    dataset: Dataset,
    processes: PartialState,
) -> HeadTrainer:
    per_pass = recipe.per_pass(processes)
    on_cpu = processes.device.type == "cpu"
    args = TrainingArguments(
        output_dir=str(folder.checkpoints),
        per_device_train_batch_size=per_pass,
        gradient_accumulation_steps=recipe.batch_size // (per_pass * processes.num_processes),
        num_train_epochs=recipe.epochs,
        learning_rate=recipe.learning_rate,
        adam_beta2=0.95,
        max_grad_norm=0.5,
        warmup_steps=WARM_UP,
        lr_scheduler_type="cosine",
        bf16=precision.pays(processes.device),
        use_cpu=on_cpu,
        ddp_backend="gloo" if on_cpu and processes.num_processes > 1 else None,
        logging_steps=math.gcd(LOG_EVERY, recipe.save_every),  # a resumed run logs the same means
        save_steps=recipe.save_every,
        save_total_limit=2,
        seed=recipe.seed,
        report_to=recipe.report_to,
        remove_unused_columns=False,
        dataloader_pin_memory=not on_cpu,
    )
    trainer = HeadTrainer(
        head,
        target,
        args,
        steps=recipe.drafted,
        loss=recipe.loss_name,
        optimizer=recipe.optimizer_name,
        anchors=recipe.anchors,
        state_weight=STATE_WEIGHT if recipe.start_from is None else 0.0,
        flex=recipe.flex,
        train_dataset=dataset,
    )
    speak(trainer)
    return trainer


def _prompt(text: Text) -> Tensor:
    """What stands before the first token that the target wrote; of a plain text its first quarter."""
    start = int(text.learn.long().argmax())
    return text.ids[: start or max(1, len(text.ids) // 4)]
