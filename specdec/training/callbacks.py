"""Callbacks of transformers' Trainer: readable log lines, with or without its progress bar, and a time limit."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)


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
    """Save a checkpoint and stop training when time is up.

    Args:
        at: end of the time, as `time.monotonic` counts.
    """

    def __init__(self, at: float):
        self.at = at

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        if state.global_step % args.logging_steps:  # stop at logged updates only, so that log intervals stay whole
            return control
        up = torch.tensor(float(time.monotonic() > self.at), device=args.device)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(up)  # all stop at the same update
        if bool(up) and state.global_step < state.max_steps:
            control.should_save = control.should_training_stop = True
            if state.is_world_process_zero:
                print(
                    f"time is up at update {state.global_step} of {state.max_steps}: run the same command again to "
                    "resume"
                )
        return control


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
