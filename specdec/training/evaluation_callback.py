"""Evaluation of a head during training, by held-out loss and with the real decoder. The best head is kept."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from specdec.data.packed_dataset import PackedTexts, StateDataset
from specdec.heads.kinds import copy_of
from specdec.training.curve import draw
from specdec.training.evaluate import Evaluation, HeldOut, Measured, evaluate
from specdec.training.processes import from_first_process
from specdec.training.run_folder import RunFolder, read_json
from specdec.training.trainer import HeadTrainer


class EvaluationCallback(TrainerCallback):
    """Evaluate the head at intervals. Writes the folder's `head`, `evaluation.json` and `curve.png`.

    Args:
        trainer: trainer whose head is evaluated.
        prompts: token ids to decode from, (T,) int64 each.
        folder: folder of the run.
        every: updates between evaluations with the decoder. 0: none; the best head is the one with the lowest held-out
            loss.
        held_out: rows that are not trained on.
        held_out_every: updates between measurements of the held-out loss.
        at_start: evaluate before the first update too, since the head may already be the best.
    """

    def __init__(
        self,
        trainer: HeadTrainer,
        prompts: Sequence[Tensor],
        folder: RunFolder,
        *,
        every: int,
        held_out: StateDataset | PackedTexts,
        held_out_every: int,
        at_start: bool = False,
    ):
        self.trainer, self.prompts, self.folder = trainer, prompts, folder
        self.every, self.at_start = every, at_start
        self.held_out, self.held_out_every = held_out, held_out_every

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.at_start and state.global_step == 0:
            self._measure_loss(state)
            if self.every:
                self._evaluate(state)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        last = state.global_step == state.max_steps
        if state.global_step % self.held_out_every == 0 or last:
            self._measure_loss(state)
        if self.every and (state.global_step % self.every == 0 or last):
            self._evaluate(state)

    def best(self) -> Measured | None:
        """Return the evaluation of the head in the folder; None in processes other than the first."""
        if not from_first_process(self.folder.evaluation.exists):
            (self._evaluate if self.every else self._measure_loss)(self.trainer.state)
        if not self.trainer.is_world_process_zero():
            return None
        entry = json.loads(self.folder.evaluation.read_text())["best"]
        if "eval_loss" in entry:
            return HeldOut(entry["eval_loss"], entry["eval_simulated_length"])
        rates = tuple(float("nan") if rate is None else rate for rate in entry["acceptance_rate_per_pos"])
        return Evaluation(**entry | {"acceptance_rate_per_pos": rates})

    def _measure_loss(self, state: TrainerState) -> None:
        if not (state.is_world_process_zero or self.trainer.teacher.collective):
            return
        found = self.trainer.held_out(self.held_out)
        if not state.is_world_process_zero:
            return
        self._log(found)
        if not self.every:
            self._write(found, state)

    def _log(self, found: dict[str, float]) -> None:
        due = self.trainer.control.should_log
        self.trainer.log(found)
        self.trainer.control.should_log = due  # logging clears it, but all processes must log at the same time

    def _evaluate(self, state: TrainerState) -> None:
        first = state.is_world_process_zero
        if first:
            print(f"update {state.global_step}: decoding {len(self.prompts)} held-out texts")
        elif not self.trainer.teacher.collective:
            return
        target, device = self.trainer.teacher.model(), self.trainer.args.device
        head = copy_of(self.trainer.head, target.dtype)
        # Decoding uses random numbers; training continues as if it had not.
        with torch.random.fork_rng([] if device.type == "cpu" else [device]):
            torch.manual_seed(self.trainer.args.seed)
            found = evaluate(head, target, self.prompts, draft_length=self.trainer.steps)
        if not first:
            return
        measured = {key: value for key, value in asdict(found).items() if isinstance(value, float)}
        self._log({f"decoder_{key}": round(value, 4) for key, value in measured.items()})
        if found.warning:
            print(f"warning: {found.warning}")
        rates = [rate if rate == rate else None for rate in found.acceptance_rate_per_pos]  # JSON has no NaN
        self._write(asdict(found) | {"acceptance_rate_per_pos": rates}, state, found.warning)

    def _write(self, found: dict[str, Any], state: TrainerState, warning: str = "") -> None:
        """Write the logs so far, and the head if none before was better."""
        content: dict[str, Any] = read_json(self.folder.evaluation) or {}
        key, sign = ("tree_length", 1) if self.every else ("eval_loss", -1)
        before = content.get("best", {}).get(key)  # None if something else was measured before
        if before is None or sign * found[key] >= sign * before:
            self.trainer.save_head(self.folder.head)
            content |= {"best": found, "best_update": state.global_step}
        dataset: Any = self.trainer.train_dataset
        content |= {"warning": warning, "tokens_per_epoch": dataset.num_tokens, "log": state.log_history}
        partial = self.folder.evaluation.with_suffix(".part")
        partial.write_text(json.dumps(content, indent=1) + "\n")
        partial.rename(self.folder.evaluation)
        draw(content, self.folder.curve)
