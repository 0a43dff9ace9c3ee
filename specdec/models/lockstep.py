"""`Step`: processes with calls of their own whose forward passes are made together (FSDP, DeepSpeed's ZeRO-3).

Weights are gathered from all processes for each pass, so all must make the same number of passes, although their
prompts differ, and what is accepted of their drafts. Before a pass all are asked who still has one to make; who is done
makes one over a single token and forgets it, until all are done. Plain `generate()` does so per token.

Owns being in step. Knows nothing of drafts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist


class Step:
    """Of one call; the other processes are in a call of theirs.

    Args:
        device: of the model; what is asked goes over it.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._done = False

    def anywhere(self, yes: bool) -> bool:
        """Is it so in any process?"""
        votes = torch.tensor(float(yes), device=self._device)
        dist.all_reduce(votes)
        return bool(votes > 0)

    def before_pass(self) -> None:
        """Called before each pass of the call's own."""
        if not self._done:
            self.anywhere(True)

    def wait(self, idle: Callable[[], None]) -> None:
        """The call is done. idle: a pass, made for the others' sake as long as one of them is not."""
        self._done = True
        while self.anywhere(False):
            idle()


def in_step(synced_gpus: bool, device: torch.device) -> Step | None:
    """None where a process makes its passes by itself. synced_gpus: of the call."""
    together = synced_gpus and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return Step(device) if together else None
