"""Training of a head from a recipe, in one call that resumes an interrupted run.

The order of the steps, and the division of work among processes, are decided here.
"""

from __future__ import annotations

import math
import time
from contextlib import nullcontext, suppress

from accelerate import PartialState
from torch import Tensor
from torch.utils.data import Dataset
from transformers import TrainingArguments

from specdec.data.packed_dataset import PackedTexts, StateDataset
from specdec.data.texts import Text
from specdec.heads.kinds import Head
from specdec.models.hardware import started_together
from specdec.training import precision
from specdec.training.callbacks import Deadline, print_summaries
from specdec.training.corpus import check_target, checksum_of_entries, corpus, write_corpus
from specdec.training.evaluate import Measured
from specdec.training.evaluation_callback import EvaluationCallback, Finished
from specdec.training.preparation import Preparation
from specdec.training.processes import from_first_process
from specdec.training.recipe import Recipe
from specdec.training.run_folder import RunFolder
from specdec.training.starting_head import given_head
from specdec.training.teacher.base import Teacher
from specdec.training.time_limit import Clock, OutOfTime, TimeLimit
from specdec.training.trainer import STATE_WEIGHT, HeadTrainer
from specdec.utils.tokenizer_files import load_tokenizer

LOG_EVERY = 10  # updates
WARM_UP = 0.04  # fraction of all updates; a fixed number such as 20 would be half of a short run


def train(recipe: Recipe, *, clock: Clock = time.monotonic, started: float | None = None) -> Measured | None:
    """Extract states, train a head and evaluate it. All files go to `recipe.out`, the best head to its `head` folder.

    A second call with the same recipe resumes an interrupted run.

    Args:
        recipe: options of the run.
        clock: function that returns seconds, for `max_minutes`.
        started: time on this clock from which `max_minutes` counts. None: now.

    Returns:
        Evaluation of the best head; None if `max_minutes` ended first, and in processes other than the first.

    Raises:
        ValueError: The recipe, its texts or its folder cannot be used, or memory or disk space ran out.

    Example:
        ```python
        evaluation = train(Recipe("Qwen/Qwen3-0.6B", Path("answers.jsonl"), Path("out")))
        print(evaluation.tree_length)
        ```
    """
    limit = TimeLimit(recipe.max_minutes, clock, started)
    folder, processes = check_recipe(recipe)
    folder.path.mkdir(parents=True, exist_ok=True)
    with folder.lock() if processes.is_main_process else nullcontext():
        if processes.is_local_main_process:
            folder.mark()
        return _train(recipe, folder, processes, limit)


def check_recipe(recipe: Recipe) -> tuple[RunFolder, PartialState]:
    """Check a recipe before any file is read, and return its folder and processes.

    Raises:
        ValueError: The recipe or its folder cannot be used.
    """
    folder = RunFolder(recipe.out)
    recipe.check()
    folder.check()
    processes = started_together(on_cpu=recipe.device == "cpu")
    recipe.check_processes(processes.num_processes)
    recipe.per_pass(processes)
    return folder, processes


def _train(recipe: Recipe, folder: RunFolder, processes: PartialState, limit: TimeLimit) -> Measured | None:
    checksum = from_first_process(lambda: checksum_of_entries(recipe))  # finds broken data before anything is loaded
    check_target(recipe)
    check_identity(recipe, folder, checksum)  # before texts are overwritten; the target's weights are checked later
    checkpoint = from_first_process(folder.last_checkpoint)  # damaged ones are named before a model is loaded
    if processes.is_local_main_process:
        write_corpus(recipe, folder, load_tokenizer(recipe.target), checksum)
    processes.wait_for_everyone()
    training_texts, held_out = corpus(folder)
    given = given_head(recipe)
    ready = Preparation(recipe, folder, processes, given, checksum, training_texts, held_out, limit).run()
    if ready is None:
        return None
    rows, measured = [
        StateDataset(place, recipe.length) if recipe.cache_states else PackedTexts(texts, recipe.length)
        for texts, place in ((training_texts, folder.states), (held_out, folder.held_out_states))
    ]
    trainer = _trainer(recipe, folder, *ready, rows, processes)
    prompts = [_prompt(text) for text in held_out]
    evaluation = EvaluationCallback(
        trainer,
        prompts,
        folder,
        every=recipe.evaluate_every,
        held_out=measured,
        held_out_every=recipe.save_every,
        at_start=recipe.start_from is not None,
        limit=limit,
    )
    if recipe.max_minutes is not None:
        trainer.add_callback(Deadline(limit))
    trainer.add_callback(evaluation)
    if checkpoint is not None:
        processes.print(f"resuming from {checkpoint}")
    with folder.readable_errors("use fewer --rows-at-once"), suppress(OutOfTime, Finished):
        trainer.train(resume_from_checkpoint=checkpoint)
    if not evaluation.is_finished():
        return None
    trainer.accelerator.wait_for_everyone()  # one process evaluates
    return evaluation.best()


def check_identity(recipe: Recipe, folder: RunFolder, checksum: str) -> None:
    """Raise ValueError if the folder holds the work of another recipe, or of texts with another checksum."""
    if found := folder.identity():
        weights = found.get("weights", "")
        folder.check_identity(recipe.identity(checksum, weights), recipe.defaults() | {"weights": weights})


def _trainer(
    recipe: Recipe,
    folder: RunFolder,
    head: Head,
    teacher: Teacher,
    dataset: Dataset,
    processes: PartialState,
) -> HeadTrainer:
    per_pass = recipe.per_pass(processes)
    on_cpu, fresh = processes.device.type == "cpu", recipe.start_from is None
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
        bf16=precision.bfloat16_is_faster(processes.device),
        use_cpu=on_cpu,
        ddp_backend="gloo" if on_cpu and processes.num_processes > 1 else None,
        # A run resumes from checkpoints, also those before evaluations, and then logs the same means.
        logging_steps=math.gcd(LOG_EVERY, recipe.save_every, recipe.evaluate_every),
        save_steps=recipe.save_every,
        save_total_limit=2,
        seed=recipe.seed,
        report_to=recipe.report_to,
        remove_unused_columns=False,
        dataloader_pin_memory=not on_cpu,
    )
    trainer = HeadTrainer(
        head,
        teacher,
        args,
        steps=recipe.drafted,
        begin_with=recipe.drafted - 1 if recipe.kind == "eagle3" and fresh else None,
        loss=recipe.loss_name,
        step_weights=recipe.step_weights,
        optimizer=recipe.optimizer_name,
        anchors=recipe.anchors,
        state_weight=STATE_WEIGHT if fresh else 0.0,
        flex=recipe.flex,
        train_dataset=dataset,
    )
    print_summaries(trainer)
    return trainer


def _prompt(text: Text) -> Tensor:
    """Return the tokens before the first answer, or the first quarter of a plain text."""
    start = int(text.learn.long().argmax())
    return text.ids[: start or max(1, len(text.ids) // 4)]
