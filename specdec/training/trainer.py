"""Trainer of draft heads, based on transformers' `Trainer`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import TrainOutput

from specdec.data.packed_dataset import PackedTexts, StateDataset, collate
from specdec.heads.dflash.head import DFlashHead
from specdec.heads.kinds import Head, copy_of, save
from specdec.heads.mtp.trainable import MtpTrainee
from specdec.training.checkpoints import PARTIAL, finish
from specdec.training.objectives.dflash import BlockObjective
from specdec.training.objectives.eagle3 import Eagle3Objective, Objective
from specdec.training.objectives.mtp import MtpObjective
from specdec.training.optimizer import muon
from specdec.training.precision import without_denormals
from specdec.training.teacher.base import Teacher
from specdec.utils.choices import LossName, OptimizerName, StepWeights, check_choice

STATE_WEIGHT = 4.0
DRAFT_FIELDS = ("ids", "learn", "documents")  # entries of a batch from which its drafts are counted


class HeadTrainer(Trainer):
    """Train a draft head with transformers' `Trainer`.

    Args:
        head: EAGLE-3 head, block drafter with its own LM head, or MTP layers. It is converted to float32.
        teacher: source of the target's states, usually `LocalTeacher.of(target, head)`.
        args: transformers' training arguments.
        steps: drafted tokens to train.
        begin_with: drafted tokens in the first half of the updates. None: `steps`.
        loss: name of a loss in `losses.LOSSES`.
        step_weights: "d-pace" (`weights_by_acceptance`), or "decay": a constant part of the step before.
        optimizer: "muon" (see `optimizer.muon`), or "adamw" for the optimizer named in `args`.
        state_weight: initial weight of the loss on final states, which falls to 0. It helps a fresh EAGLE or MTP head;
            block drafters do not use it.
        flex: use flex attention, see `unroll`. EAGLE-3 heads only.
        anchors: blocks per row of texts. Block drafters only.
        kwargs: further arguments of `Trainer`. `train_dataset` is a `StateDataset`, or a `PackedTexts`, whose states
            are computed for every batch.

    Raises:
        ValueError: The states of `train_dataset` are from other layers than the head reads.

    Example:
        ```python
        head = initialize(target, 8192)
        HeadTrainer(head, LocalTeacher.of(target, head), args, train_dataset=rows).train()
        ```
    """

    def __init__(
        self,
        head: Head,
        teacher: Teacher,
        args: TrainingArguments,
        *,
        steps: int = 3,
        begin_with: int | None = None,
        loss: LossName = "ce",
        step_weights: StepWeights = "decay",
        optimizer: OptimizerName = "adamw",
        state_weight: float = STATE_WEIGHT,
        flex: bool = False,
        anchors: int = 64,
        **kwargs: Any,
    ):
        check_choice("step_weights", step_weights, StepWeights)
        dataset = kwargs.get("train_dataset")
        if isinstance(dataset, StateDataset) and dataset.taps != teacher.taps:
            raise ValueError(
                f"the states are from layers {dataset.taps}, but the head reads {teacher.taps}: extract them again"
            )
        if args.n_gpu > 1:
            args._n_gpu = 1  # DataParallel would split the rows of one loss
            print("only one of several GPUs is used: start with `accelerate launch` to use all")
        head.float().requires_grad_(True).train()  # a loaded one is frozen, and often in half precision
        ids = head.draft_to_target
        assert ids is not None
        needed: Any = (head, teacher.embedding.to(args.device), teacher.logits.restricted(ids).to(args.device))
        self.objective: Objective
        if isinstance(head, DFlashHead):
            self.objective = BlockObjective(*needed, steps=steps, loss=loss, anchors=anchors)
        elif isinstance(head, MtpTrainee):
            self.objective = MtpObjective(*needed, steps=steps, loss=loss)
        else:
            self.objective = Eagle3Objective(*needed, steps=steps, loss=loss, flex=flex)
        # Flex attention is compiled for each length.
        batches = partial(collate, length=dataset.length) if flex and dataset is not None else collate
        super().__init__(model=self.objective, args=args, data_collator=batches, **kwargs)
        # The losses of an update's passes add up, so the Trainer must not divide them by the number of passes.
        self.model_accepts_loss_kwargs = True
        self.head, self.teacher, self.steps, self._muon = head, teacher, steps, optimizer == "muon"
        self._by_acceptance = step_weights == "d-pace"
        self._begin_with = min(steps, begin_with or steps)
        self.state_weight = 0.0 if isinstance(head, DFlashHead) else state_weight
        self._accuracies: list[Tensor] = []  # of the batches since the last log
        self._saving = False

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        with without_denormals():
            return super().train(*args, **kwargs)

    def _get_output_dir(self, *arguments: Any, **options: Any) -> str:
        place = super()._get_output_dir(*arguments, **options)
        return str(Path(place) / PARTIAL) if self._saving else place

    def _save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        """Write a checkpoint next to the others and move it to its place when it is complete, see `finish`."""
        folder = Path(self.args.output_dir)
        partial = folder / PARTIAL / f"checkpoint-{self.state.global_step}"
        if self.args.should_save:
            shutil.rmtree(folder / PARTIAL, ignore_errors=True)  # of a run that was killed
        self.accelerator.wait_for_everyone()
        self._saving = True
        try:
            super()._save_checkpoint(*arguments, **options)
        finally:
            self._saving = False
        # Processes of other machines may have a disk of their own, with the random states that they wrote.
        for finishes in (self.args.process_index == 0, self.args.local_process_index == 0):
            self.accelerator.wait_for_everyone()
            if finishes and partial.exists():
                finish(partial, folder)
        self.accelerator.wait_for_everyone()

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Optimizer:
        if not self._muon:
            return super().create_optimizer(*args, **kwargs)
        betas = self.args.adam_beta1, self.args.adam_beta2
        self.optimizer: Optimizer = muon(self.head, self.args.learning_rate, betas)
        return self.optimizer

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list, Any]:
        """Return the batches of an update, and its number of drafts per step (steps,) over all processes."""
        batches = list(islice(epoch_iterator, num_batches))
        update, updates = self.state.global_step, self.state.max_steps
        self.objective.update, self.objective.steps = update, self._begin_with if 2 * update < updates else self.steps
        counts = torch.zeros(self.objective.steps, device=device)
        for batch in batches:
            counts += self._counts(batch).to(device)
        # DDP averages the processes' gradients; with the mean of their counts this is the gradient of all rows.
        return batches, self.accelerator.reduce(counts, "mean")

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        done = self.state.global_step / max(1, self.state.max_steps)
        self.objective.state_weight, self.objective.update = self.state_weight * (1 - done), self.state.global_step
        self.objective.by_acceptance = self._by_acceptance
        outputs = model(**self.teacher.states(inputs), counts=num_items_in_batch)
        loss = outputs["loss"].detach()
        if not bool(loss.isfinite()):
            raise ValueError(
                f"the loss is {float(loss)} at update {self.state.global_step}: try a lower learning rate, in another "
                f"folder. Earlier checkpoints are kept in {self.args.output_dir}"
            )
        self._accuracies.append(outputs["accuracy"].detach())
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, together with the loss, the accuracy of each step and the mean acceptance length simulated from it."""
        if "loss" in logs and self._accuracies:
            accuracy = torch.stack([a for a in self._accuracies if len(a) == len(self._accuracies[-1])]).mean(0)
            logs |= {f"accuracy_{step}": round(float(a), 4) for step, a in enumerate(accuracy)}
            logs["simulated_length"] = _simulated_length(accuracy)
            self._accuracies.clear()
        super().log(logs, *args, **kwargs)

    @torch.no_grad()
    def held_out(
        self,
        rows: StateDataset | PackedTexts,
        should_continue: Callable[[], bool] = lambda: True,
        progress: Callable[[int], Any] = lambda rows: None,
    ) -> dict[str, float]:
        """Measure the loss (without that on states) and the simulated acceptance length on other texts.

        One process alone may call it, unless the teacher works in several (`Teacher.collective`).

        Args:
            rows: rows to measure.
            should_continue: called before every pass but the first. If it returns False, the rows so far are used.
            progress: called after each pass with its number of rows.

        Returns:
            `eval_loss`, `eval_simulated_length`, and `eval_rows`, the number of rows measured.
        """
        at_once = self.args.per_device_train_batch_size
        self.objective.state_weight, self.objective.update = 0.0, 0  # the same anchors every time
        self.objective.steps, self.objective.by_acceptance = self.steps, False  # losses of two heads are comparable
        places = [range(start, min(start + at_once, len(rows))) for start in range(0, len(rows), at_once)]
        # Rows are read twice, and their states pass by pass: those of all rows may not fit into memory.
        drafts = [self.data_collator([_without_states(rows[i]) for i in place]) for place in places]
        counts = [self._counts(self._prepare_inputs(batch)) for batch in drafts]
        whole = torch.stack(counts).sum(0)  # the passes' losses add up to the loss per draft of all rows
        loss, done, hits, measured = 0.0, 0, torch.zeros_like(whole, dtype=torch.float32), torch.zeros_like(whole)
        for place, count in zip(places, counts, strict=True):
            if done and not should_continue():
                break
            batch = self.data_collator([rows[i] for i in place])
            outputs = self.objective(**self.teacher.states(self._prepare_inputs(batch)), counts=whole)
            accuracy = outputs["accuracy"]
            loss += float(outputs["loss"])
            hits[: len(accuracy)] += accuracy * count[: len(accuracy)]
            measured += count
            done += len(batch["ids"])
            progress(len(batch["ids"]))
        if done < len(rows):
            loss *= float(whole.sum() / measured.sum().clamp(min=1))
        length = _simulated_length(hits / measured.clamp(min=1))
        return {"eval_loss": round(loss, 4), "eval_simulated_length": length, "eval_rows": done}

    def _counts(self, batch: dict[str, Tensor]) -> Tensor:
        """Count the drafts of a batch that are trained on, (steps of the objective,) int64."""
        return self.objective.drafts(*(batch[name] for name in DRAFT_FIELDS)).sum((1, 2))

    def save_head(self, folder: str | Path) -> None:
        """Write the head, in bfloat16.

        Files of an earlier head are replaced once the new ones are complete. Other files in the folder stay.

        Raises:
            ValueError: The folder holds another model's weights.
        """
        save(copy_of(self.head, torch.bfloat16), Path(folder), self.teacher.name)


def _without_states(row: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: row[name] for name in DRAFT_FIELDS}


def _simulated_length(accuracy: Tensor) -> float:
    """Return the mean acceptance length for accuracies (steps,), taking the steps as independent."""
    return round(1 + float(accuracy.cumprod(-1).sum()), 4)
