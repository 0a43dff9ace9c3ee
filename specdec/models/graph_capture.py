"""`capturing`: the context in which every CUDA graph is captured.

`torch.cuda.graph` captures all graphs on one stream of the process, synchronizes the device and empties its caches.
When a capture fails, it does not restore the stream and the generator. A library that runs in the processes of others
cannot afford this (for example pytorch/pytorch#193402).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Any

import torch

from specdec.sampling.noise import generator_lock

_lock = Lock()  # CUDA allows one capture per process


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
                with suppress(RuntimeError):  # a consequence of the first error
                    graph.capture_end()
                raise
            graph.capture_end()
        before.wait_stream(stream)


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
