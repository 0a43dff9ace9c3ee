"""Evaluation of a head during training, by held-out loss and with the real decoder. The best head is kept.

The checkpoint of an update is written before its evaluations, so that a kill in one of them loses no update.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from specdec.data.packed_dataset import PackedTexts, StateDataset
from specdec.heads.kinds import copy_of
from specdec.training.callbacks import time_is_up
from specdec.training.checkpoints import STATE, write_whole
from specdec.training.curve import draw
from specdec.training.evaluate import Evaluation, HeldOut, Measured, evaluate
from specdec.training.processes import from_first_process
from specdec.training.run_folder import RunFolder, read_json
from specdec.training.time_limit import OutOfTime, TimedSteps, TimeLimit
from specdec.training.trainer import HeadTrainer


@dataclass(frozen=True)
class Kind:
    """A kind of evaluation, and its entries in the log.

    Attributes:
        name: what it does.
        unit: what it counts.
        result: field of a log's entry with its result.
        count: field with the number of rows or texts.
        seconds: field with the time that the slowest of its steps took.
    """

    name: str
    unit: str
    result: str
    count: str
    seconds: str


UPDATE_SECONDS = "update_seconds"  # field of an entry with the time of an update
LOSS = Kind("loss", "rows", "eval_loss", "eval_rows", "eval_seconds")
DECODED = Kind("decoding", "texts", "decoder_tree_length", "decoder_texts", "decoder_seconds")


class Finished(Exception):
    """The run that is resumed has all its updates and evaluations."""


class EvaluationCallback(TrainerCallback):
    """Evaluate the head at intervals. Writes the folder's `head`, `evaluation.json` and `curve.png`.

    An evaluation for which too little time is left is cut to some of its texts, or left out. One that was left out is
    made first when the run resumes.

    Args:
        trainer: trainer whose head is evaluated.
        prompts: token ids to decode from, (T,) int64 each.
        folder: folder of the run.
        every: updates between evaluations with the decoder. 0: none; the best head is the one with the lowest held-out
            loss.
        held_out: rows that are not trained on.
        held_out_every: updates between measurements of the held-out loss.
        at_start: evaluate before the first update too, since the head may already be the best.
        limit: time limit of the run.
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
        limit: TimeLimit | None = None,
    ):
        self.trainer, self.prompts, self.folder = trainer, prompts, folder
        self.every, self.at_start = every, at_start
        self.held_out, self.held_out_every = held_out, held_out_every
        self.limit = limit or TimeLimit()
        self._begun = self._update_seconds = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        missing = self._all() * self.at_start
        if state.global_step > 0:
            missing = from_first_process(lambda: self._missing(state))
        if missing:
            self._run(state, missing, first=True)
            self._record(state)
        if state.global_step >= state.max_steps:  # transformers looks only after an update
            raise Finished
        if not missing or self.limit.is_zero:
            return
        update = max((entry.get(UPDATE_SECONDS, 0.0) for entry in state.log_history), default=0.0)
        if not self.limit.allows((args.logging_steps + 1) * update, together=args.device):
            raise OutOfTime

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._begun = self.limit.clock()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._update_seconds = self.limit.clock() - self._begun
        if self._due(state):
            control.should_save = True  # `on_save` evaluates

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not (due := self._due(state)):
            return
        self._run(state, due)
        self._record(state)
        if state.global_step < state.max_steps and not self.limit.is_zero and not control.should_training_stop:
            # Another log interval must fit, with its checkpoint.
            needed = (args.logging_steps + 1) * self._update_seconds
            control.should_training_stop = not self.limit.allows(needed, together=args.device)
            if control.should_training_stop:
                self._say(state, time_is_up(state))

    def is_finished(self) -> bool:
        """Return whether the run has all its updates, and an evaluation of the last one."""
        state = self.trainer.state
        done = state.global_step >= state.max_steps and self._entry(state, self._all()[-1]) is not None
        return from_first_process(lambda: done)

    def best(self) -> Measured | None:
        """Return the evaluation of the head in the folder; None in processes other than the first."""
        if not from_first_process(lambda: "best" in (read_json(self.folder.evaluation) or {})):
            self._run(self.trainer.state, self._all()[-1:], first=True)
        if not self.trainer.is_world_process_zero():
            return None
        entry = json.loads(self.folder.evaluation.read_text())["best"]
        if "eval_loss" in entry:
            return HeldOut(entry["eval_loss"], entry["eval_simulated_length"], entry.get("eval_rows", 0))
        entry = {name: math.nan if value is None else value for name, value in entry.items()}
        rates = tuple(math.nan if rate is None else rate for rate in entry["acceptance_rate_per_pos"])
        return Evaluation(**entry | {"acceptance_rate_per_pos": rates})

    def _all(self) -> list[Kind]:
        """Return the kinds of evaluations of a run. The last one chooses the best head."""
        return [LOSS, DECODED] if self.every else [LOSS]

    def _due(self, state: TrainerState) -> list[Kind]:
        """Return the evaluations to make after an update."""
        last = state.global_step == state.max_steps
        loss = state.global_step % self.held_out_every == 0 or last
        decode = self.every and (state.global_step % self.every == 0 or last)
        return [LOSS] * bool(loss) + [DECODED] * bool(decode)

    def _missing(self, state: TrainerState) -> list[Kind]:
        """Return the evaluations of the update that the run resumes from for which no time was left.

        After the last update, also those that were cut.
        """
        whole = {LOSS: len(self.held_out), DECODED: len(self.prompts)}
        missing = []
        for kind in self._due(state):
            entry = self._entry(state, kind)
            cut = entry is not None and entry.get(kind.count, whole[kind]) < whole[kind]
            if entry is None or (cut and state.global_step == state.max_steps):
                missing.append(kind)
        return missing

    def _entry(self, state: TrainerState, kind: Kind) -> dict[str, float] | None:
        """Return the log's newest entry of an evaluation of the current update; None if there is none."""
        found = [
            entry for entry in state.log_history if entry.get("step") == state.global_step and kind.result in entry
        ]
        return found[-1] if found else None

    def _run(self, state: TrainerState, kinds: Sequence[Kind], first: bool = False) -> None:
        """Evaluate in the first process; in all of them if the teacher works in several.

        first: nothing else was done since the command began. Something must be, whatever time is left.
        """
        collective = self.trainer.teacher.collective
        if not (state.is_world_process_zero or collective):
            return
        together = self.trainer.args.device if collective else None
        hidden = self.trainer.args.disable_tqdm or not state.is_world_process_zero
        for kind in kinds:
            size = len(self.held_out if kind is LOSS else self.prompts)
            what, update = f"held-out {kind.unit} ({kind.name})", f"update {state.global_step}"
            guess = self._update_seconds if kind is LOSS else 0.0  # a pass takes less time than an update
            with tqdm(total=size, desc=what, leave=False, disable=hidden, dynamic_ncols=True) as bar:
                steps = TimedSteps(
                    self.limit,
                    max((entry[kind.seconds] for entry in state.log_history if kind.seconds in entry), default=guess),
                    unlimited=first and self.limit.is_zero,
                    together=together,
                    progress=bar.update,
                )
                try:
                    if not first and not steps.may_begin():
                        raise OutOfTime
                    done = (self._measure_loss if kind is LOSS else self._evaluate)(state, steps, first)
                except OutOfTime:
                    self._say(state, f"{update}: no time is left for {size} {what}: the next run evaluates them first")
                    continue
            if done < size:
                self._say(state, f"{update}: the time limit cut the evaluation to {done} of {size} {what}")

    def _say(self, state: TrainerState, text: str) -> None:
        if state.is_world_process_zero:
            print(text)

    def _record(self, state: TrainerState) -> None:
        """Add the evaluations to the checkpoint's log."""
        checkpoint = self.folder.checkpoints / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and checkpoint.exists():
            write_whole(checkpoint / STATE, lambda path: state.save_to_json(str(path)))

    def _measure_loss(self, state: TrainerState, steps: TimedSteps, first: bool) -> int:
        found = self.trainer.held_out(self.held_out, steps.may_begin, steps.done)
        if state.is_world_process_zero:
            seconds = {LOSS.seconds: round(steps.longest, 3), UPDATE_SECONDS: round(self._update_seconds, 3)}
            self._log(found | seconds)
            if not self.every:
                self._write(found, state)
        return int(found[LOSS.count])

    def _log(self, found: dict[str, float]) -> None:
        due = self.trainer.control.should_log
        self.trainer.log(found)
        self.trainer.control.should_log = due  # logging clears it, but all processes must log at the same time

    def _evaluate(self, state: TrainerState, steps: TimedSteps, first: bool) -> int:
        """Decode the prompts. first: at least one of them must be decoded, whatever time is left."""
        self._say(state, f"update {state.global_step}: decoding {len(self.prompts)} held-out texts")
        target, device = self.trainer.teacher.model(), self.trainer.args.device
        head = copy_of(self.trainer.head, target.dtype)
        steps.begin()
        # Decoding uses random numbers; training continues as if it had not.
        with torch.random.fork_rng([] if device.type == "cpu" else [device]):
            torch.manual_seed(self.trainer.args.seed)
            found = evaluate(
                head,
                target,
                self.prompts,
                draft_length=self.trainer.steps,
                should_continue=steps.may_begin,
                progress=steps.done,
                first_within=(lambda: math.inf) if first or self.trainer.teacher.collective else steps.left,
            )
        if not state.is_world_process_zero:
            return found.texts
        measured = {key: value for key, value in asdict(found).items() if isinstance(value, float)}
        entry = {f"decoder_{key}": round(value, 4) for key, value in measured.items()}
        self._log(entry | {DECODED.count: found.texts, DECODED.seconds: round(steps.longest, 3)})
        if found.warning:
            print(f"warning: {found.warning}")
        self._write(asdict(found), state, found.warning)
        return found.texts

    def _write(self, found: dict[str, Any], state: TrainerState, warning: str = "") -> None:
        """Write the logs so far, and the head if none before was better."""
        content: dict[str, Any] = read_json(self.folder.evaluation) or {}
        key, sign, count = ("tree_length", 1, "texts") if self.every else ("eval_loss", -1, "eval_rows")
        whole = len(self.prompts if self.every else self.held_out)
        before = content.get("best", {})
        counted, counted_before = found[count], before.get(count) or whole
        # Only evaluations over the same texts compare: one of more texts is believed instead of one that was cut.
        # Where nothing could be measured, the newest head is kept.
        better = counted > counted_before or (
            counted == counted_before
            and (before.get(key) is None or math.isnan(before[key]) or sign * found[key] >= sign * before[key])
        )
        if key not in before or better:
            self.trainer.save_head(self.folder.head)
            content |= {"best": found, "best_update": state.global_step}
        dataset: Any = self.trainer.train_dataset
        content |= {"warning": warning, "tokens_per_epoch": dataset.num_tokens, "log": state.log_history}
        partial = self.folder.evaluation.with_suffix(".part")
        partial.write_text(json.dumps(_without_nan(content), indent=1) + "\n")
        partial.rename(self.folder.evaluation)
        draw(content, self.folder.curve)


def _without_nan(value: Any) -> Any:
    """Replace what was not measured by null: JSON has no NaN."""
    if isinstance(value, dict):
        return {name: _without_nan(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(inner) for inner in value]
    return None if isinstance(value, float) and math.isnan(value) else value
