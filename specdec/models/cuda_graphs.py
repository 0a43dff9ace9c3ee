"""`Recorder`: captures functions that calls repeat as CUDA graphs, and replays each as one launch.

A captured function takes and returns tensors. It may also write to buffers with a fixed address. No Python runs during
a replay. A later call of the same kind gets the recorder of an earlier one with its buffers (`models.graph_pool`).

The first call runs a function eagerly before it is captured, and checks that the replay gives the same result. Later
calls capture known functions at once and without a check: an eager round of a large model takes several times as long
as a replay.
"""

from __future__ import annotations

import logging
import warnings
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Thread, current_thread
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch
from torch import Tensor, nn

from specdec.models.cache.kv_cache import SpeculativeCache
from specdec.models.graph_capture import capturing, give_back, take_stream

log = logging.getLogger(__name__)

WARM = 1  # eager runs before capture, not counting the one that the first replay is checked against
MOST = 24  # captured functions; the one that was used least recently makes room for another
STATES = 2  # states of the models for which checked functions are remembered: they keep the modules alive
WRONG = 1e-2  # tolerance, relative and absolute, between a replay and the eager run before it

Named = dict[str, Tensor]
Function = Callable[..., Named]
Like = Mapping[str, tuple[torch.Size, torch.dtype]]  # shapes and dtypes of a function's outputs


@dataclass
class KnownFunctions:
    """Knowledge of captured functions that calls with the same models share.

    Attributes:
        checked: by thread and state of the models, the functions that it has captured and checked, by key and inputs.
            Another thread runs them eagerly first: libraries prepare kernels per thread, which a capture may not
            contain. So does the first call after a change of the models, which may compile them anew.
        refused: the reason why capture is disabled for good; empty while it is enabled.
    """

    checked: WeakKeyDictionary[Thread, dict[Hashable, dict[Hashable, Like]]] = field(default_factory=WeakKeyDictionary)
    refused: str = ""

    def here(self, state: Hashable) -> dict[Hashable, Like]:
        """The functions that this thread has checked with the models in this state."""
        states = self.checked.setdefault(current_thread(), {})
        known = states[state] = states.pop(state, {})
        if len(states) > STATES:
            del states[next(iter(states))]
        return known


class Recorder:
    """Captures and replays the functions of one call at a time, and keeps them for later calls of the same kind.

    Args:
        known: what earlier calls with the same models have learned; this call adds to it.
        state: state of the models, see `fingerprint`.

    Attributes:
        refused: the reason why capture is disabled; empty while it is enabled.
        pending: draft nodes that captured drafts leave in their cache, by key.
        captures: number of functions captured so far.
    """

    def __init__(self, known: KnownFunctions | None = None, state: Hashable = None) -> None:
        self._known, self._state = KnownFunctions() if known is None else known, state
        self.refused = self._known.refused
        self.pending: dict[object, int] = {}
        self.captures = 0
        self._caches: dict[str, SpeculativeCache] = {}
        self._runs: dict[Hashable, int] = {}
        self._captured: dict[Hashable, CapturedFunction] = {}
        self._pool: Any = None  # memory for intermediate tensors, shared by all graphs since no two run at once
        # A stream of its own: a graph that is freed takes along the workspaces of the stream it was captured on.
        self._stream: Any = None

    def __len__(self) -> int:
        return len(self._captured)

    def lend(self, role: str, cache: SpeculativeCache) -> None:
        """Give the empty cache of a call the buffers that the last call's cache had, with which functions are captured.

        Args:
            role: whose cache it is: "target" or "draft".
            cache: the cache of a call of the same kind, see `GraphPool`.
        """
        before = self._caches.get(role)
        if before is not None:
            cache.take_over(before)
        self._caches[role] = cache

    def clear(self) -> None:
        """Free all graphs and buffers."""
        self._captured, self._caches = {}, {}

    def __call__(
        self,
        where: Hashable,
        key: Hashable,
        function: Function,
        inputs: Mapping[str, Tensor],
        columns: Mapping[str, int] | None = None,
    ) -> Named:
        """Run a function, by a replay where it is captured.

        Args:
            where: addresses of the buffers to which the function writes.
            key: identifies what the function does, apart from its inputs and their shapes: all Python state it uses.
            function: takes the inputs by name and returns tensors by name. It may be run twice in a row, the second
                time on buffers that the first run has written.
            inputs: tensors on the device, by name.
            columns: by name, the number of columns of an input (B, n) that the function takes. An input with fewer is
                copied into the first of them; the others have any values that it had before, or 0.

        Returns:
            The function's outputs, valid until the next call with the same addresses and key.
        """
        columns = columns or {}
        shapes = {
            name: (len(given), columns[name]) if name in columns else given.shape for name, given in inputs.items()
        }
        kind = (key, *((name, shapes[name], given.dtype) for name, given in inputs.items()))
        mine = (where, kind)
        if mine in self._captured:
            captured = self._captured[mine] = self._captured.pop(mine)  # the last one is the one used last
            return captured.replay(inputs)
        inputs = {name: _widened(given, shapes[name]) for name, given in inputs.items()}
        if self.refused:
            return function(**inputs)
        runs = self._runs[mine] = self._runs.get(mine, 0) + 1
        checked = self._known.here(self._state)  # the next call may run in another thread
        if runs <= WARM and kind not in checked:
            return function(**inputs)
        if kind in checked:
            made = self._recording(mine, function, inputs, checked[kind])
            return function(**inputs) if made is None else made
        right = {name: given.clone() for name, given in function(**inputs).items()}
        like = {name: (given.shape, given.dtype) for name, given in right.items()}
        ours = self._recording(mine, function, inputs, like)
        differ = [] if ours is None else [name for name, given in right.items() if not _same(ours[name], given)]
        if differ:
            self._refuse(f"a replay gave different values of {', '.join(differ)}")
        elif ours is not None:
            checked[kind] = like
        return right

    def _recording(
        self, mine: tuple[Hashable, Hashable], function: Function, inputs: Mapping[str, Tensor], like: Like
    ) -> Named | None:
        """Capture a function and replay it once. None if this fails, which also disables capture."""
        try:
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
                self._stream = take_stream(next(iter(inputs.values())).device)
                finalize(self, give_back, self._stream).atexit = False
            recording = CapturedFunction(function, inputs, like, self._pool, self._stream)
            ours = recording.replay(inputs)
        except (RuntimeError, AttributeError, TypeError) as error:
            # A host sync or another operation that cannot be captured, or torch's interface differs from 2.9 to 2.15.
            first = _cause(error)
            reason = f"{type(first).__name__}: {str(first).strip().partition(chr(10))[0][:160]}"
            self._refuse(reason, for_good=not isinstance(first, torch.OutOfMemoryError))
            return None
        if len(self) == MOST:
            del self._captured[next(iter(self._captured))]
        self._captured[mine] = recording
        self.captures += 1
        log.info("captured %s", mine[1])
        return ours

    def _refuse(self, reason: str, for_good: bool = True) -> None:
        self.refused = reason
        if for_good:
            self._known.refused = reason
        self._captured = {}
        warnings.warn(f"specdec: drafting and verification run without CUDA graphs: {reason}", stacklevel=2)


class CapturedFunction:
    """A function's CUDA graph with its static input and output tensors.

    Neither is in the shared memory pool, which the replay of any other graph overwrites.
    """

    def __init__(self, function: Function, inputs: Mapping[str, Tensor], like: Like, pool: Any, stream: Any):
        self._function = function  # what it refers to must not be freed
        self._inputs = {name: given.clone() for name, given in inputs.items()}
        device = next(iter(inputs.values())).device
        self._outputs = {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in like.items()}
        self._graph = torch.cuda.CUDAGraph()
        with capturing(self._graph, pool, stream):
            _copy_all(self._outputs, function(**self._inputs))
        # If the work ran instead of being captured, for example on another device, then no replay writes the outputs.
        for output in self._outputs.values():
            output.fill_(True if output.dtype == torch.bool else -1)

    def replay(self, inputs: Mapping[str, Tensor]) -> Named:
        """Copy the inputs, replay the graph and return its static outputs."""
        first = {
            name: static if static.shape == inputs[name].shape else static[:, : inputs[name].shape[1]]
            for name, static in self._inputs.items()
        }
        _copy_all(first, inputs)
        self._graph.replay()
        return self._outputs


def _copy_all(targets: Mapping[str, Tensor], sources: Mapping[str, Tensor]) -> None:
    """Copy tensors by name: one launch per dtype where torch has its internal operator for it (2.9 to 2.15).

    A target that is not contiguous takes a launch of its own.
    """
    together: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for name, source in sources.items():
        target = targets[name]
        if hasattr(torch, "_foreach_copy_") and target.is_contiguous():
            together[source.dtype].append((target.flatten(), source.contiguous().flatten()))  # with equal strides
        else:
            target.copy_(source)
    for pairs in together.values():
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


def _widened(given: Tensor, shape: Sequence[int]) -> Tensor:
    """Pad the columns of a tensor with zeros."""
    return given if tuple(given.shape) == tuple(shape) else nn.functional.pad(given, (0, shape[1] - given.shape[1]))


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
