"""`GraphPool`: CUDA graphs with their buffers, kept between calls of the same kind."""

from __future__ import annotations

from collections.abc import Hashable
from threading import Lock

import torch

from specdec.models.cuda_graphs import Recorder

MOST = 4  # recorders that are kept
SCARCE = 0.1  # share of the device's memory; with less of it free, nothing is kept


class GraphPool:
    """Recorders that no call uses. Each is handed out to one call at a time.

    The kind of a call says what its captured functions read in Python: batch size, settings, models. What they read
    from tensors is read again at each replay.
    """

    def __init__(self) -> None:
        self._idle: list[tuple[Hashable, Recorder]] = []  # the last one is the one used last
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._idle)

    def __del__(self) -> None:
        self.clear()  # captured functions refer to their recorder, and would keep its memory until garbage collection

    def take(self, kind: Hashable) -> Recorder | None:
        """Hand out a recorder of this kind; None if there is none."""
        with self._lock:
            for place in reversed(range(len(self._idle))):
                if self._idle[place][0] == kind:
                    return self._idle.pop(place)[1]
        return None

    def put(self, kind: Hashable | None, recorder: Recorder, device: torch.device) -> None:
        """Keep the recorder of a call that has ended, unless its kind is None or memory is short; else free it."""
        if kind is None or recorder.refused or not len(recorder) or is_scarce(device):
            recorder.clear()
            return
        with self._lock:
            self._idle.append((kind, recorder))
            dropped = [] if len(self._idle) <= MOST else [self._idle.pop(0)[1]]
        for other in dropped:
            other.clear()

    def clear(self) -> None:
        """Free all recorders that no call uses."""
        with self._lock:
            dropped, self._idle = self._idle, []
        for _, recorder in dropped:
            recorder.clear()


def is_scarce(device: torch.device) -> bool:
    """Return whether less than a tenth of the device's memory is free or reserved by torch without being used."""
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + reserved < SCARCE * total
