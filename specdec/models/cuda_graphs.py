"""`Recorder`: what one call asks of a device again and again, recorded once and replayed as one launch (CUDA graphs).

Owns the memory that recordings read from, and when to record. Knows nothing of drafts or models: a function of tensors
is recorded, which may also write to buffers that stay where they are. Of Python's state nothing is asked in a replay.

What one call found to be recordable, later ones record at once, without a run before and without looking whether the
replay gives the same: an eager round of a large model takes several times a replayed one.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Hashable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

WARM = 1  # runs of a function before it is recorded; it is run once more then, by which what it compiles is compiled
MOST = 24  # recordings of a call
WRONG = 1e-2  # by so much, relatively, what a replay gives may differ from what the run before it gave

Named = dict[str, Tensor]
Function = Callable[..., Named]
Like = Mapping[str, tuple[torch.Size, torch.dtype]]  # of what a function gives
Known = MutableMapping[Hashable, Like]  # by what functions do


class Recorder:
    """Of one call.

    Args:
        known: what calls of the same models have recorded and found right; what this one does is added.

    Attributes:
        refused: why nothing is recorded any more; empty while it is.
    """

    def __init__(self, known: Known | None = None) -> None:
        self.refused = ""
        self._known: Known = {} if known is None else known
        self._runs: dict[Hashable, int] = {}
        self._captured: dict[Hashable, CapturedFunction] = {}
        self._pool: Any = None  # memory for what is made on the way: of all recordings, as no two run at once

    def __len__(self) -> int:
        return len(self._captured)

    def __call__(self, owner: object, key: Hashable, function: Function, inputs: Mapping[str, Tensor]) -> Named:
        """What the function gives for the inputs; valid until the same owner and key come again.

        Args:
            owner: of the buffers that the function writes to, which are there; it lives as long as the call.
            key: what the function does but for its inputs and their sizes: everything in it that is Python's.
            function: of the inputs by name. It may be run twice in a row, the second time over what the first wrote.
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
            self._refuse(f"a replay gave other {', '.join(differ)}")
        elif ours is not None:
            self._known[kind] = like
        return right

    def _recording(self, mine: Hashable, function: Function, inputs: Mapping[str, Tensor], like: Like) -> Named | None:
        """Record, and replay for the first time; None, and nothing is recorded any more, where that fails."""
        try:
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            recording = CapturedFunction(function, inputs, like, self._pool)
            ours = recording.replay(inputs)
        except (RuntimeError, AttributeError, TypeError) as error:
            # It waits for the device, or does what cannot be recorded; or torch's interface for graphs is another than
            # in 2.9 to 2.15.
            first = _cause(error)
            self._refuse(f"{type(first).__name__}: {str(first).strip().partition(chr(10))[0][:160]}")
            return None
        self._captured[mine] = recording
        log.info("recorded %s", mine)
        return ours

    def _refuse(self, reason: str) -> None:
        self.refused = reason
        self._captured = {}
        warnings.warn(f"specdec: drafts and verdicts run without graphs: {reason}", stacklevel=2)


class CapturedFunction:
    """One function's kernels, and the memory in which they find their inputs and leave what they give.

    Neither lies in the pool: of what does, the replay of any other recording leaves nothing as it was.
    """

    def __init__(self, function: Function, inputs: Mapping[str, Tensor], like: Like, pool: Any):
        self._inputs = {name: given.clone() for name, given in inputs.items()}
        device = next(iter(inputs.values())).device
        self._outputs = {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in like.items()}
        dtypes = {given.dtype for given in inputs.values()}  # tensors of one are copied by one launch
        self._alike = [[name for name, given in inputs.items() if given.dtype == dtype] for dtype in dtypes]
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            for name, given in function(**self._inputs).items():
                self._outputs[name].copy_(given)

    def replay(self, inputs: Mapping[str, Tensor]) -> Named:
        for names in self._alike:
            _copy_all([self._inputs[name] for name in names], [inputs[name] for name in names])
        self._graph.replay()
        return self._outputs


def _copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensors of one dtype, in one launch where torch has its internal operator for that (2.9 to 2.15)."""
    if hasattr(torch, "_foreach_copy_"):
        torch._foreach_copy_(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _cause(error: BaseException) -> BaseException:
    """What went wrong first: that a recording ended badly is said behind it."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def _same(ours: Tensor, right: Tensor) -> bool:
    if not right.is_floating_point():
        return bool(torch.equal(ours, right))
    return bool(torch.allclose(ours.float(), right.float(), rtol=WRONG, atol=WRONG, equal_nan=True))
