"""`Deadline`: stops training when time is up, in a way that the same command can go on from."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class Deadline(TrainerCallback):
    """Saves and stops when time is up."""

    def __init__(self, at: float):
        self.at = at

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        if state.global_step % args.logging_steps:  # what is logged is of whole intervals, stopped or not
            return control
        up = torch.tensor(float(time.monotonic() > self.at), device=args.device)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(up)  # all stop at the same update
        if bool(up) and state.global_step < state.max_steps:
            control.should_save = control.should_training_stop = True
            if state.is_world_process_zero:
                print(f"time is up at update {state.global_step} of {state.max_steps}: the same command goes on")
        return control
