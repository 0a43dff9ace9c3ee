"""A pretended "cuda" on a CPU build of torch: true values, a device's errors, and a ledger of what a device would do.

    pretend.install()                                # once per process, before the first tensor goes to "cuda"
    with pretend.ledger() as book: spec.generate(ids.to("cuda"))
    book.waits, book.launches, book.uploads, book.captures      # Counters by (what, region, "file.py:line")

A CPU build has no kernels for CUDA tensors, so a Python function may be registered as all of them. It runs each
operation on the CPU tensors inside of its arguments. Mixing devices raises as on CUDA. What makes the host wait there
is a *wait*: reading a value, copying from pageable memory, shapes that depend on values. Copies to and from pinned
memory that do not block are none; and what such a copy brings is rubbish until an event was waited for.

Time is told by a clock that advances by a millisecond whenever it is read: what specdec decides by measured costs is
the same in every run, however busy the machine is.

Not seen: limits of kernels, streams, memory, graphs, times. Kernels are counted by operation: some of torch's launch
several. It reaches into torch's device guards, which Python can make since a release after 2.9 (read in 2.13 and 2.15;
`missing` says what is not there): processes that pretend do nothing else.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

import specdec
from specdec.engine import report

DEVICE, _CPU = torch.device("cuda", 0), torch.device("cpu")
OURS = f"{Path(specdec.__file__).parent}{os.sep}"  # the folder whose frames are named in the ledger
NO_KERNEL = {"detach", "alias", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_"}
SHAPED_BY_VALUES = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount", "equal"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
RUBBISH = -(2**40)


@dataclass
class Ledger:
    """What was asked of the device, by (what, region, place)."""

    waits: Counter = field(default_factory=Counter)
    launches: Counter = field(default_factory=Counter)
    uploads: Counter = field(default_factory=Counter)
    captures: Counter = field(default_factory=Counter)

    def count(self, kind: str, *regions: str) -> int:
        """Count "waits", "launches", "uploads" or "captures" in these regions; in all of them if none is given."""
        return sum(times for (_, where, _), times in getattr(self, kind).items() if not regions or where in regions)


_ticks = count()


def now() -> float:
    """Seconds, by the pretended clock."""
    return next(_ticks) / 1000


_ledgers: list[Ledger] = []
_here = threading.local()


@contextmanager
def ledger() -> Iterator[Ledger]:
    book = Ledger()
    _ledgers.append(book)
    try:
        yield book
    finally:
        _ledgers.remove(book)


@contextmanager
def region(name: str) -> Iterator[None]:
    """What this thread does within belongs to this part of the program."""
    before, _here.region = getattr(_here, "region", ""), name
    try:
        yield
    finally:
        _here.region = before


def _book(kind: str, what: str) -> None:
    if (graph := _capturing()) is not None:
        if kind in ("launches", "captures"):
            return
        graph.spoiled = True
        raise RuntimeError(f"operation not permitted while a graph is captured: {what}")
    for book in list(_ledgers):
        getattr(book, kind)[what, getattr(_here, "region", ""), _place()] += 1


def _place() -> str:
    frame = sys._getframe(3)
    while frame is not None and not frame.f_code.co_filename.startswith(OURS):
        frame = frame.f_back
    if frame is None:
        return "elsewhere"
    return f"{frame.f_code.co_filename.removeprefix(OURS)}:{frame.f_lineno}"


class Pretended(torch.Tensor):
    """Says that it is on "cuda:0"; its values are in `carried`, a CPU tensor."""

    carried: torch.Tensor

    @staticmethod
    def __new__(cls, real: torch.Tensor) -> Pretended:
        made = torch.Tensor._make_wrapper_subclass(
            cls, real.shape, real.stride(), real.storage_offset(), dtype=real.dtype, device=DEVICE
        )
        made.carried = real
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})

    __torch_function__ = torch._C._disabled_torch_function_impl  # results keep their own type

    def tolist(self):
        return self.cpu().tolist()

    def data_ptr(self):
        return self.carried.data_ptr()

    def __repr__(self, *, tensor_contents=None) -> str:
        return f"Pretended({self.carried!r})"

    def __tensor_flatten__(self):  # tells `Module.to` to swap parameters
        return ["carried"], None

    def __deepcopy__(self, memo):
        copied = type(self)(self.carried.clone()).requires_grad_(self.requires_grad)
        return memo.setdefault(id(self), copied)

    def __reduce_ex__(self, protocol):
        return Pretended, (self.carried,)


def _attention(*args, **kwargs):
    """One kernel; C++ would take it apart, for want of one."""
    pretended = any(isinstance(value, Pretended) for value in (*args, *kwargs.values()))
    return _run(_kernel, args, kwargs) if pretended else scaled_dot_product_attention(*args, **kwargs)


def _kernel(*args, **kwargs):
    return scaled_dot_product_attention(*args, **kwargs)


_kernel._schema, _kernel.is_view = SimpleNamespace(name="scaled_dot_product_attention"), False


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation on the device: booked, or taken into a graph, and computed on the CPU."""
    name = func._schema.name.removeprefix("aten::")
    ours: dict[int, Pretended] = {}
    theirs: list[torch.Tensor] = []

    def inside(value: Any) -> Any:
        if isinstance(value, Pretended):
            ours[id(value.carried)] = value
            return value.carried
        if isinstance(value, torch.Tensor):
            theirs.append(value)
        elif isinstance(value, (list, tuple)):
            return type(value)(inside(item) for item in value)
        elif isinstance(value, torch.device):
            return _CPU
        return value

    def outside(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return ours[id(value)] if id(value) in ours else Pretended(value)  # in place: the very tensor
        return type(value)(outside(item) for item in value) if isinstance(value, (list, tuple)) else value

    inner_args = tuple(inside(value) for value in args)
    inner_kwargs = {key: inside(value) for key, value in kwargs.items() if key != "pin_memory"}
    if name in ("_to_copy", "copy_") and (theirs or kwargs.get("device", DEVICE).type == "cpu"):
        return _copied(func, args, kwargs)
    _check(name, args, kwargs, mixed=bool(ours) and any(tensor.dim() for tensor in theirs))
    if not func.is_view and name not in NO_KERNEL and name != "_local_scalar_dense":
        _book("launches", name)
    result = func(*inner_args, **inner_kwargs)
    if (graph := _capturing()) is not None:
        graph.take(func, inner_args, inner_kwargs, result)
    return outside(result)


def _check(name: str, args: Any, kwargs: dict[str, Any], mixed: bool) -> None:
    """Book what the host waits for; raise what a device raises."""
    if name == "_local_scalar_dense":
        _book("waits", "reads a value")
    elif name in SHAPED_BY_VALUES or (name == "repeat_interleave" and kwargs.get("output_size") is None):
        _book("waits", f"shape by values: {name}")
    elif name in INDEXING:
        for index in args[1]:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                _book("waits", "shape by values: boolean index")
            elif index is not None and not isinstance(index, Pretended) and index.dim():
                _book("uploads", "index")
                _book("waits", "from pageable memory: index")
    elif mixed:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
            f"(when running {name})"
        )


def _copied(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A copy between the host and the device."""
    if func._schema.name == "aten::copy_":
        target, source, *more = args
        blocks = not (more[0] if more else kwargs.get("non_blocking", False))
    else:
        target, source, blocks = None, args[0], not kwargs.get("non_blocking", False)
    if isinstance(source, Pretended):
        real = source.carried.to(**{k: v for k, v in kwargs.items() if k in ("dtype", "copy")})
        target = torch.empty_like(real) if target is None else target
        if blocks or not _pinned(target):
            _book("waits", "to the host")
            _catch_up()
            return target.copy_(real)
        target.fill_(torch.tensor(RUBBISH).to(target.dtype))
        _on_their_way.append((target, real.clone()))
        return target
    _book("uploads", "copy")
    if blocks or not _pinned(source):
        if source.dim() or not blocks:
            _book("waits", "from pageable memory")
        else:
            _book("waits", "from pageable memory: a number")
    if target is not None:
        target.carried.copy_(source)
        return target
    return Pretended(source.to(kwargs.get("dtype") or source.dtype, copy=True))


# Pinned memory and events

_pinned_storages: set[int] = set()
_kept: list[torch.Tensor] = []  # pinned memory is never freed: its address stands for it
_on_their_way: list[tuple[torch.Tensor, torch.Tensor]] = []  # (where, what) of copies that did not block


def _pinned(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() in _pinned_storages


def _pin(tensor: torch.Tensor) -> torch.Tensor:
    made = tensor.clone()
    _kept.append(made)
    _pinned_storages.add(made.untyped_storage().data_ptr())
    return made


def _deliver(copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for copy in copies:
        target, brought = copy
        target.copy_(brought)
    _on_their_way[:] = [copy for copy in _on_their_way if not any(copy is done for done in copies)]


class Event:
    """`torch.cuda.Event`; times are the pretended clock's."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._timed = enable_timing
        self._at: float | None = None
        self._over = False
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def record(self, stream: Any = None) -> None:
        self.device = (stream or _current_stream()).device
        self._at, self._over = now(), False
        self._before = list(_on_their_way)
        _events.append(self)

    def synchronize(self) -> None:
        _book("waits", "for an event")
        _deliver(self._before)
        _passed(_events[: _events.index(self) + 1] if self in _events else [])

    def query(self) -> bool:
        return self._over

    def elapsed_time(self, end: Event) -> float:
        if not (self._timed and end._timed and self._over and end._over):
            raise RuntimeError("events that are not timed, not recorded or not over yet")
        return 1e3 * (end._at - self._at)


_events: list[Event] = []  # recorded, in order, and not known to be over


def _passed(events: list[Event]) -> None:
    for event in events:
        event._over = True
    del _events[: len(events)]


def _synchronize(device: Any = None) -> None:
    _book("waits", "for the device")
    _catch_up()


def _catch_up() -> None:
    """The host has waited for all that was asked of the device."""
    _deliver(_on_their_way)
    _passed(list(_events))


# Graphs


class CUDAGraph:
    """`torch.cuda.CUDAGraph`: operations over the memory that they were captured with, run again in one launch.

    Until its first replay what a real one leaves behind is undefined: here it is rubbish. So is, after a replay, what
    the other graphs of its memory pool made: a real one may have written over it.
    """

    def __init__(self) -> None:
        self.steps: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []  # operation, its arguments, its results
        self.own: list[tuple[torch.Tensor, float]] = []  # each result in memory of the graph's own, and its rubbish
        self.neighbours: weakref.WeakSet[CUDAGraph] = weakref.WeakSet()  # of its pool, itself among them
        self.spoiled = False

    def take(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        given = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        results = _tensors(result)
        for made in results:
            if made.untyped_storage().data_ptr() not in given and made.dtype != torch.bool:
                self.own.append((made, float("nan") if made.is_floating_point() else -RUBBISH >> 20))
        if not func.is_view:
            self.steps.append((func, args, kwargs, results))

    def spoil(self) -> None:
        for made, rubbish in self.own:
            made.fill_(rubbish)

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        """Only one capture at a time, on a stream of its own: on the default stream it is an error."""
        if not _one_at_a_time.acquire(blocking=False):
            raise RuntimeError("another capture is under way")
        if _current_stream() is _default_streams.get(_device()):
            _one_at_a_time.release()
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        if pool is not None:
            self.neighbours = _pools.setdefault(pool, weakref.WeakSet())
            self.neighbours.add(self)
        _book("captures", "begins")
        self.stream = _current_stream()
        _here.graph = self

    def capture_end(self) -> None:
        """As on a device, an operation that was not permitted makes the end of its capture an error as well."""
        graph, _here.graph = _here.graph, None
        _one_at_a_time.release()
        if graph.spoiled:
            raise RuntimeError("operation failed due to a previous error during capture")
        graph.spoil()

    def replay(self) -> None:
        _book("launches", "replay")
        for other in self.neighbours:
            if other is not self:
                other.spoil()
        for func, args, kwargs, results in self.steps:
            for made, value in zip(results, _tensors(func(*args, **kwargs)), strict=True):
                if made is not value:
                    made.copy_(value)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in _tensors(item)]


_pools: dict[Any, weakref.WeakSet[CUDAGraph]] = {}


def _capturing() -> CUDAGraph | None:
    return getattr(_here, "graph", None)


_one_at_a_time = threading.Lock()


# Devices and streams


class Stream:
    """`torch.cuda.Stream`: work is done at once, so that it only tells where work would go."""

    def __init__(self, device: Any = None) -> None:
        self.device = _device(device)

    def wait_stream(self, other: Stream) -> None:
        pass


def _device(given: Any = None) -> torch.device:
    """The device that is meant, the thread's current one by default."""
    if given is None or torch.device(given).index is None:
        return torch.device("cuda", getattr(_here, "device", 0))
    return torch.device(given)


@contextmanager
def _current_device(device: Any) -> Iterator[None]:
    before, _here.device = getattr(_here, "device", 0), _device(device).index
    try:
        yield
    finally:
        _here.device = before


def _current_stream(device: Any = None) -> Stream:
    """The stream of the innermost `torch.cuda.stream` of this thread on the device, or the device's default stream."""
    device = _device(device)
    mine = [stream for stream in getattr(_here, "streams", ()) if stream.device == device]
    return mine[-1] if mine else _default_streams.setdefault(device, Stream(device))


_default_streams: dict[torch.device, Stream] = {}


@contextmanager
def _on_stream(stream: Stream) -> Iterator[None]:
    _here.streams = [*getattr(_here, "streams", ()), stream]
    try:
        with _current_device(stream.device):
            yield
    finally:
        _here.streams = _here.streams[:-1]


# Generators: the pretended device's numbers are the CPU's


class Generator(torch._C.Generator):
    def __new__(cls, device: Any = "cpu") -> Generator:
        return super().__new__(cls, "cpu")


_libraries: list[torch.library.Library] = []
_guards: list[Any] = []  # lent to C++, and so kept
# What of torch's own is used, as it was read in 2.13 and 2.15: where it lies, and its name. 2.9 has no `_acc`.
INTERNALS = (
    ("torch._C._acc", "DeviceGuard"),
    ("torch._C._acc", "register_python_privateuseone_device_guard"),
    ("torch._C", "_set_only_lift_cpu_tensors"),
    ("torch._C", "_disabled_torch_function_impl"),
    ("torch._C", "_jit_get_all_schemas"),
    ("torch.Tensor", "_make_wrapper_subclass"),
    ("torch.library.Library", "fallback"),
    ("torch.__future__", "set_swap_module_params_on_conversion"),
)
REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"  # in libc10.so: a guard for each of 21 kinds of devices


def missing() -> str | None:
    """Why nothing can be pretended with this torch: the first of its internals that is not there."""
    for owner, name in INTERNALS:
        try:
            attrgetter(f"{owner}.{name}".removeprefix("torch."))(torch)
        except AttributeError:
            return f"torch {torch.__version__} has no {owner}.{name}, which the pretended device is made with"
    if not hasattr(_c10(), REGISTRY):
        return f"torch {torch.__version__} has no {REGISTRY} in libc10.so, where the pretended device's guard goes"
    return None


def install() -> None:
    """Let "cuda" be pretended in this process from now on. See `missing` first."""
    if _libraries:
        return
    if reason := missing():
        raise RuntimeError(reason)
    if torch.cuda.is_available():
        raise RuntimeError("there is a real CUDA device here: nothing is pretended beside it")
    _lend_guard()
    in_this_thread()
    torch.__future__.set_swap_module_params_on_conversion(True)
    kernels, factories = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    _libraries.extend((kernels, factories))
    kernels.fallback(lambda func, *args, **kwargs: _run(func, args, kwargs), "CUDA")
    for factory in _factories():
        factories.impl(factory, partial(_made, factory), "CUDA")
    report.perf_counter = now
    cuda, accelerator = torch.cuda, torch.accelerator
    cuda._lazy_init = lambda: None
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.manual_seed_all = lambda seed: None  # `torch.manual_seed` sees to the CPU's
    cuda.synchronize = accelerator.synchronize = _synchronize
    cuda.Event = Event
    cuda.CUDAGraph, cuda.graph_pool_handle = CUDAGraph, object
    cuda.is_current_stream_capturing = lambda: _capturing() is not None
    cuda.Stream, cuda.stream, cuda.current_stream, cuda.device = Stream, _on_stream, _current_stream, _current_device
    cuda.mem_get_info = lambda device=None: (60 * 2**30, 80 * 2**30)
    cuda.memory_reserved = cuda.memory_allocated = lambda device=None: 0
    cuda.empty_cache = lambda: None
    cuda.current_device = lambda: _device().index
    cuda.get_device_name = lambda device=None: "pretended"
    cuda.get_device_capability = lambda device=None: (9, 0)
    torch.nn.functional.scaled_dot_product_attention = _attention
    torch.Generator = Generator
    torch.Tensor.pin_memory = lambda self, device=None: _pin(self)
    torch.Tensor.is_pinned = lambda self, device=None: _pinned(self)


def in_this_thread() -> None:
    """Set what torch keeps per thread: `torch.tensor(..., device="cuda")` is made on the CPU, then copied."""
    torch._C._set_only_lift_cpu_tensors(True)


def _made(factory: Any, *args: Any, **kwargs: Any) -> Any:
    return _run(factory, args, kwargs)


def _factories() -> Iterator[Callable[..., Any]]:
    """Operations without a tensor among their arguments; C++ would resize an empty one for them."""
    for schema in torch._C._jit_get_all_schemas():
        takes = {str(argument.type) for argument in schema.arguments}
        on_device = any(argument.name == "device" for argument in schema.arguments)
        if schema.name.startswith("aten::") and on_device and not any("Tensor" in kind for kind in takes):
            packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::"))
            factory = getattr(packet, schema.overload_name or "default", None)
            if factory is not None and len(schema.returns) == 1:
                yield factory


def _lend_guard() -> None:
    """C++ asks the device's guard in indexing, `.to()` and `torch.tensor()`; Python may make one for another device."""

    class Guard(torch._C._acc.DeviceGuard):
        def type_(self):
            return torch._C._autograd.DeviceType.CUDA

    _guards.append(Guard())
    torch._C._acc.register_python_privateuseone_device_guard(_guards[-1])
    guards = (ctypes.c_void_p * 21).in_dll(_c10(), REGISTRY)
    cuda, lender = 1, 20  # c10/core/DeviceType.h
    guards[cuda], guards[lender] = guards[lender], None


def _c10() -> ctypes.CDLL:
    return ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))
