"""Callbacks of transformers' Trainer: readable log lines, with or without its progress bar, and a time limit."""

from __future__ import annotations

from collections import deque
from typing import Any

from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from specdec.training.time_limit import TimeLimit


class ProgressPrinter(ProgressCallback):
    """Progress bar that writes a line per log entry, where transformers' own prints a dictionary."""

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        if self.training_bar is not None and logs:
            self.training_bar.write(summary(logs, state))


class SummaryPrinter(PrinterCallback):
    """Printer of the same lines for runs without a progress bar."""

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero and logs:
            print(summary(logs, state))


class Deadline(TrainerCallback):
    """Save a checkpoint and stop training before the time limit. Add it before the callback that evaluates.

    Training stops at a logged update if it can, so that log intervals stay whole: before one that is not expected to
    fit. If not even one interval fits, it stops within it.

    Args:
        limit: time limit of the run.
    """

    def __init__(self, limit: TimeLimit):
        self.limit = limit
        self._updates: deque[float] = deque(maxlen=10)  # seconds of the last ones
        self._started = self._ended = limit.clock()
        self._count, self._save_time = 0, 0.0  # updates of this command; seconds of the slowest checkpoint

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._started = self.limit.clock()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        self._ended = self.limit.clock()
        if self._count == 1:
            self._updates.clear()  # the first update is slower (allocator, compilation)
        self._updates.append(self._ended - self._started)
        self._count += 1
        within = bool(state.global_step % args.logging_steps)
        if within and self.limit.is_zero:
            return control
        longest = max(self._updates)
        ahead = 1 if within else min(args.logging_steps, state.max_steps - state.global_step)
        needed = ahead * longest + (self._save_time or longest)
        if state.global_step < state.max_steps and not self.limit.allows(needed, together=args.device):
            control.should_save = control.should_training_stop = control.should_log = True
            if state.is_world_process_zero:
                print(time_is_up(state))
        return control

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Measure how long the checkpoint took."""
        self._save_time = max(self._save_time, self.limit.clock() - self._ended)


def time_is_up(state: TrainerState) -> str:
    """Say at which update the time limit ended a run."""
    return f"time is up at update {state.global_step} of {state.max_steps}: run the same command again to resume"


def print_summaries(trainer: Trainer) -> None:
    """Replace the trainer's logging callbacks with those of this module."""
    for theirs, ours in {ProgressCallback: ProgressPrinter, PrinterCallback: SummaryPrinter}.items():
        if trainer.pop_callback(theirs) is not None:
            trainer.add_callback(ours())


def summary(logs: dict[str, float], state: TrainerState) -> str:
    """Format an entry logged by `HeadTrainer` or `EvaluationCallback` as a line, with the last held-out loss."""
    update = state.global_step
    if "decoder_tree_length" in logs:
        return (
            f"update {update}: accepted per round {logs['decoder_tree_length']:.2f} tokens with trees at T=0, "
            f"{logs['decoder_tree_length_sampled']:.2f} at T=1; chains {logs['decoder_mean_acceptance_length']:.2f}, "
            f"simulated {logs['decoder_simulated_length']:.2f}"
        )
    if "simulated_length" in logs:
        shares = " ".join(f"{logs[key]:.2f}" for key in logs if key.startswith("accuracy_"))
        return (
            f"update {update}: loss {logs['loss']:.3f}, first choices right {shares} (step by step){_held_out(state)}"
        )
    if "eval_loss" in logs:
        return f"update {update}: {_summary_held_out(logs)}"
    if "train_runtime" in logs:
        return f"trained and evaluated for {logs['train_runtime'] / 60:.1f} minutes"
    return ", ".join(f"{key} {value}" for key, value in logs.items())


def _held_out(state: TrainerState) -> str:
    for entry in reversed(state.log_history):
        if "eval_loss" in entry:
            return f"; {_summary_held_out(entry)} at update {entry['step']}"
    return ""


def _summary_held_out(entry: dict[str, float]) -> str:
    return f"held-out texts: loss {entry['eval_loss']:.3f}, simulated length {entry['eval_simulated_length']:.2f}"


def format_size(size: float, digits: int = 1) -> str:
    """Format a size in bytes as MB or GB. digits: decimals of gigabytes."""
    return f"{size / 1e9:.{digits}f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
