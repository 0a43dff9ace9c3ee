"""CPU threads: the cores that this process may use, and a warning if torch computes with more threads than that."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import torch

GROUPS_OF_PROCESS = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")
_warned: set[str] = set()  # messages of this process


def usable_cores() -> int:
    """Number of cores that this process may use: the smaller of its CPU affinity and its control groups' quota.

    torch starts a thread for every core of the affinity. A container's quota (`docker run --cpus 2`) does not change
    the affinity.

    Examples:
        >>> usable_cores() >= 1
        True
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([affinity, *(math.ceil(quota) for quota in _quotas())])


def warn_of_excess_threads(device: torch.device, stacklevel: int = 2) -> None:
    """Warn, once per process, if torch computes on the CPU with more threads than there are usable cores.

    Threads without a core of their own wait for each other at every operation. The counts show this without timing.

    Args:
        device: device of the model; nothing is warned of for others than the CPU.
        stacklevel: as of `warnings.warn`.
    """
    if device.type != "cpu" or (threads := torch.get_num_threads()) <= (cores := usable_cores()):
        return
    message = (
        f"specdec: torch computes with {threads} threads, but this process may use {cores} of the CPU's cores: threads "
        "wait for each other at every operation, which can take many times as long. Set OMP_NUM_THREADS="
        f"{cores} before the start, or call torch.set_num_threads({cores})"
    )
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=stacklevel + 1)


def _quotas() -> Iterator[float]:
    """Yield the CPU quotas, in cores, of this process's control groups and of the groups that contain them."""
    try:
        lines = GROUPS_OF_PROCESS.read_text().splitlines()
    except OSError:
        return  # not Linux
    for line in lines:  # "0::/path" in version 2, "1:cpu,cpuacct:/path" in version 1
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        group = PurePosixPath(path)
        for part in (group, *group.parents):  # within a container the path may be the host's: only the root exists
            folder = GROUPS / ("cpu" if controllers else "") / str(part).lstrip("/")
            try:
                if controllers:
                    quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
                else:
                    quota, period = (folder / "cpu.max").read_text().split()
                if quota != "max" and int(quota) > 0:  # -1 in version 1: no quota
                    yield int(quota) / int(period)
            except (OSError, ValueError):
                continue
