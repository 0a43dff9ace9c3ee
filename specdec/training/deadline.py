"""Time limit of a training run. A stopped run is resumed by the same command."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


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
