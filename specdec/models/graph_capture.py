"""`capturing`: the context in which every CUDA graph is captured.

`torch.cuda.graph` captures all graphs on one stream of the process, synchronizes the device and empties its caches.
When a capture fails, it does not restore the stream and the generator. A library that runs in the processes of others
cannot afford this (for example pytorch/pytorch#193402).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Lock, RLock
from typing import Any

import torch

from specdec.sampling.noise import generator_lock

POOLED = 32  # streams of a device, which torch hands out in turns

_lock = Lock()  # CUDA allows one capture per process
_streams_lock = RLock()  # a finalizer may give a stream back while this thread takes one
_users: defaultdict[torch.device, Counter[Any]] = defaultdict(Counter)  # by stream, the captures that use it


def take_stream(device: torch.device) -> Any:
    """Return a `torch.cuda.Stream` that no other capture uses until `give_back`, or the one that the fewest use.

    A graph that is freed takes along the workspaces of its stream, which other graphs of that stream would still use.
    """
    with _streams_lock:
        users = _users[device]
        for _ in range(POOLED if all(users.values()) else 0):
            made = torch.cuda.Stream(device)
            if made not in users:
                users[made] = 0
                break
        stream = min(users, key=users.__getitem__)
        users[stream] += 1
        return stream


def give_back(stream: Any) -> None:
    """Let another capture use a stream."""
    with _streams_lock:
        _users[stream.device][stream] -= 1


@contextmanager
def capturing(graph: Any, pool: Any, stream: Any) -> Iterator[None]:
    """Capture the work that this thread launches within the context.

    Other threads may launch work meanwhile, but not capture. After an error the stream and the default generator are
    those from before. Under autocast weights are converted within the graph: copies that autocast keeps are freed when
    the caller's context ends.

    Args:
        graph: a `torch.cuda.CUDAGraph`.
        pool: memory pool of the graph's intermediate tensors.
        stream: a `torch.cuda.Stream` of the tensors' device that nothing else captures on.

    Raises:
        RuntimeError: an operation within the context cannot be captured.
    """
    with _lock, torch.cuda.device(stream.device):
        before = torch.cuda.current_stream()
        stream.wait_stream(before)
        with torch.cuda.stream(stream), _without_kept_copies():
            _begin(graph, pool, stream.device)
            try:
                yield
            except BaseException:
                _end_failed(graph, pool, stream.device)
                raise
            graph.capture_end()
        before.wait_stream(stream)


def _end_failed(graph: Any, pool: Any, device: torch.device) -> None:
    """End a capture after an error.

    Up to torch 2.12 `capture_end` then raises before it tells the allocator (pytorch/pytorch#180395), which would not
    free its cache again in this process.
    """
    try:
        graph.capture_end()
    except RuntimeError:  # a consequence of the first error
        with suppress(RuntimeError, AttributeError):  # where torch has told the allocator
            torch._C._cuda_endAllocateToPool(device.index, pool)


@contextmanager
def _without_kept_copies() -> Iterator[None]:
    """Let autocast convert weights at each use."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _begin(graph: Any, pool: Any, device: torch.device) -> None:
    """Begin a capture that leaves the device's default generator alone.

    Up to torch 2.11 a capture marks the state of the default generator as its own: until it ends, random numbers in any
    other thread are an error, and after a failure in this one, too. The captured functions draw none. So the mark is
    set on a copy of the state.
    """
    generators = getattr(torch.cuda, "default_generators", ())
    generator = generators[device.index] if len(generators) > device.index else None
    if not hasattr(generator, "graphsafe_set_state"):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        return
    with generator_lock:
        own = generator.graphsafe_get_state()
        generator.graphsafe_set_state(generator.clone_state())
        try:
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        finally:
            generator.graphsafe_set_state(own)
