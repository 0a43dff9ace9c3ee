"""`Recorder`: captures functions that a call repeats as CUDA graphs, and replays each as one launch.

A captured function takes and returns tensors. It may also write to buffers with a fixed address. No Python runs during
a replay.

The first call runs a function eagerly before it is captured, and checks that the replay gives the same result. Later
calls capture known functions at once and without a check: an eager round of a large model takes several times as long
as a replay.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Hashable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

WARM = 1  # eager runs before capture, not counting the one that the first replay is checked against
MOST = 24  # captured functions per call
WRONG = 1e-2  # tolerance, relative and absolute, between a replay and the eager run before it

Named = dict[str, Tensor]
Function = Callable[..., Named]
Like = Mapping[str, tuple[torch.Size, torch.dtype]]  # shapes and dtypes of a function's outputs
Known = MutableMapping[Hashable, Like]  # by key and inputs of the function


class Recorder:
    """Captures and replays the functions of one call.

    Args:
        known: functions that calls with the same models have captured and checked; this call adds its own.

    Attributes:
        refused: the reason why capture is disabled; empty while it is enabled.
    """

    def __init__(self, known: Known | None = None) -> None:
        self.refused = ""
        self._known: Known = {} if known is None else known
        self._runs: dict[Hashable, int] = {}
        self._captured: dict[Hashable, CapturedFunction] = {}
        self._pool: Any = None  # memory for intermediate tensors, shared by all graphs since no two run at once

    def __len__(self) -> int:
        return len(self._captured)

    def __call__(self, owner: object, key: Hashable, function: Function, inputs: Mapping[str, Tensor]) -> Named:
        """Run a function, by a replay where it is captured.

        Args:
            owner: object that holds the buffers to which the function writes; it lives as long as the call.
            key: identifies what the function does, apart from its inputs and their shapes: all Python state it uses.
            function: takes the inputs by name and returns tensors by name. It may be run twice in a row, the second
                time on buffers that the first run has written.
            inputs: tensors on the device, by name.

        Returns:
            The function's outputs, valid until the next call with the same owner and key.
        """
        if self.refused:
            return function(**inputs)
        kind = (key, *((name, given.shape, given.dtype) for name, given in inputs.items()))
        mine = (id(owner), kind)
        if mine in self._captured:
            return self._captured[mine].replay(inputs)
        runs = self._runs[mine] = self._runs.get(mine, 0) + 1
        if len(self) == MOST or (runs <= WARM and kind not in self._known):
            return function(**inputs)
        if kind in self._known:
            made = self._recording(mine, function, inputs, self._known[kind])
            return function(**inputs) if made is None else made
        right = {name: given.clone() for name, given in function(**inputs).items()}
        like = {name: (given.shape, given.dtype) for name, given in right.items()}
        ours = self._recording(mine, function, inputs, like)
        differ = [] if ours is None else [name for name, given in right.items() if not _same(ours[name], given)]
        if differ:
            self._refuse(f"a replay gave different values of {', '.join(differ)}")
        elif ours is not None:
            self._known[kind] = like
        return right

    def _recording(self, mine: Hashable, function: Function, inputs: Mapping[str, Tensor], like: Like) -> Named | None:
        """Capture a function and replay it once. None if this fails, which also disables capture."""
        try:
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            recording = CapturedFunction(function, inputs, like, self._pool)
            ours = recording.replay(inputs)
        except (RuntimeError, AttributeError, TypeError) as error:
            # A host sync or another operation that cannot be captured, or torch's interface differs from 2.9 to 2.15.
            first = _cause(error)
            self._refuse(f"{type(first).__name__}: {str(first).strip().partition(chr(10))[0][:160]}")
            return None
        self._captured[mine] = recording
        log.info("captured %s", mine)
        return ours

    def _refuse(self, reason: str) -> None:
        self.refused = reason
        self._captured = {}
        warnings.warn(f"specdec: drafting and verification run without CUDA graphs: {reason}", stacklevel=2)


class CapturedFunction:
    """A function's CUDA graph with its static input and output tensors.

    Neither is in the shared memory pool, which the replay of any other graph overwrites.
    """

    def __init__(self, function: Function, inputs: Mapping[str, Tensor], like: Like, pool: Any):
        self._inputs = {name: given.clone() for name, given in inputs.items()}
        device = next(iter(inputs.values())).device
        self._outputs = {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in like.items()}
        dtypes = {given.dtype for given in inputs.values()}  # tensors of the same dtype are copied in one launch
        self._alike = [[name for name, given in inputs.items() if given.dtype == dtype] for dtype in dtypes]
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            for name, given in function(**self._inputs).items():
                self._outputs[name].copy_(given)

    def replay(self, inputs: Mapping[str, Tensor]) -> Named:
        """Copy the inputs, replay the graph and return its static outputs."""
        for names in self._alike:
            _copy_all([self._inputs[name] for name in names], [inputs[name] for name in names])
        self._graph.replay()
        return self._outputs


def _copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensors of the same dtype, in one launch where torch has its internal operator for it (2.9 to 2.15)."""
    if hasattr(torch, "_foreach_copy_"):
        torch._foreach_copy_(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _cause(error: BaseException) -> BaseException:
    """The first error of a chain: the failure of the capture is only its consequence."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def _same(ours: Tensor, right: Tensor) -> bool:
    """Return whether a replay's output equals the eager one, within `WRONG` for floating-point tensors."""
    if not right.is_floating_point():
        return bool(torch.equal(ours, right))
    return bool(torch.allclose(ours.float(), right.float(), rtol=WRONG, atol=WRONG, equal_nan=True))
