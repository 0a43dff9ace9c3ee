"""`Step`: keeps the forward passes of processes with sharded weights in lockstep (FSDP, DeepSpeed's ZeRO-3).

Weights are gathered from all processes for each pass. So all processes must make the same number of passes, although
their prompts and accepted tokens differ. Before each pass the processes agree whether any of them needs one. A finished
process runs passes over a single token and discards the result until all have finished. Plain `generate()` does the
same per token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist


class Step:
    """Lockstep of one call with the calls of the other processes.

    Args:
        device: device of the model, over which the processes communicate.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._done = False

    def anywhere(self, yes: bool) -> bool:
        """Return whether `yes` is True in any process. All processes must call this."""
        votes = torch.tensor(float(yes), device=self._device)
        dist.all_reduce(votes)
        return bool(votes > 0)

    def before_pass(self) -> None:
        """Synchronise with the other processes. Called before each pass of this call."""
        if not self._done:
            self.anywhere(True)

    def wait(self, idle: Callable[[], None]) -> None:
        """Mark this call as finished and call `idle`, which runs a pass, until all processes have finished."""
        self._done = True
        while self.anywhere(False):
            idle()


def in_step(synced_gpus: bool, device: torch.device) -> Step | None:
    """A `Step` if the call has `synced_gpus` and there are several processes, else None."""
    together = synced_gpus and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return Step(device) if together else None
