"""Measure attention of draft nodes over KV buffers on a GPU, inside of CUDA graphs: microseconds per layer.

    python -m benchmarks.regression.attention
    python -m benchmarks.regression.attention --small    # a few sizes on the CPU, by Triton's interpreter

Compares transformers' function, packed queries, torch's `enable_gqa` and the Triton kernel with several tiles. Each
call of a graph reads another layer's buffers, so that they do not stay in the L2 cache. The floor is the time to read
the filled slots at `BANDWIDTH`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from time import perf_counter
from types import SimpleNamespace
from typing import Annotated, Any

os.environ.setdefault("TRITON_INTERPRET", str(int("--small" in sys.argv)))  # read when Triton is imported

import torch
import typer
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from specdec.models import draft_attention

HEADS, KV_HEADS, DIMS = 32, 8, 128
BANDWIDTH = 2.9e12  # bytes per second, of an H100
CACHED = 2**27  # bytes of buffers that a graph reads, more than an L2 cache holds
REPLAYS = 5
OTHER_TILES = {  # by nodes: queries and slots per tile, warps, stages
    1: [(16, 128, 4, 2), (16, 32, 4, 4), (16, 64, 4, 4)],
    8: [(32, 128, 4, 2), (32, 32, 4, 4), (32, 64, 8, 3)],
    64: [(64, 64, 8, 3), (128, 64, 8, 2), (64, 32, 4, 3)],
}
Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # query, keys, values and mask: (B, n, H, D)
app = typer.Typer(add_completion=False)


class Case:
    """Queries, buffers of several layers and a mask of a chain of `nodes` after `filled` slots."""

    def __init__(self, nodes: int, slots: int, filled: float, device: torch.device, dtype: torch.dtype, heads: int):
        generator = torch.Generator(device).manual_seed(0)
        layer_bytes = 2 * KV_HEADS * slots * DIMS * dtype.itemsize
        self.layers = 2 if device.type == "cpu" else max(4, CACHED // layer_bytes)

        def made(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        self.query = made(1, nodes, heads, DIMS).transpose(1, 2)
        self.buffers = [(made(1, KV_HEADS, slots, DIMS), made(1, KV_HEADS, slots, DIMS)) for _ in range(self.layers)]
        self.end = int(filled * slots)
        last = self.end - nodes + torch.arange(nodes, device=device)
        self.mask = (torch.arange(slots, device=device) <= last[:, None])[None, None]
        self.floor = 1e6 * layer_bytes * self.end / slots / BANDWIDTH
        self._right: Tensor | None = None

    def error(self, attention: Attention) -> float:
        """Largest difference of an attention function from float64."""
        keys, values = self.buffers[0]
        if self._right is None:
            self._right = draft_attention._reference(self.query, keys, values, self.mask[:, 0])
        return float((attention(self.query, keys, values, self.mask).double() - self._right).abs().max())

    def microseconds(self, attention: Attention) -> float:
        """Time of one layer, from the fastest of several replays of all layers."""

        def run() -> None:
            for keys, values in self.buffers:
                attention(self.query, keys, values, self.mask)

        if self.query.device.type == "cpu":
            start = perf_counter()
            run()
            return 1e6 * (perf_counter() - start) / self.layers
        return 1e6 * _replayed(run) / self.layers


def _replayed(run: Callable[[], None]) -> float:
    """Seconds of a replay of a captured function."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return min(times)


def _transformers(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    module: Any = SimpleNamespace(num_key_value_groups=query.shape[1] // keys.shape[1], is_causal=True)
    return sdpa_attention_forward(module, query, keys, values, mask, scaling=DIMS**-0.5)[0]


def _packed(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    before, draft_attention.TRITON_FROM = draft_attention.TRITON_FROM, 2**40
    try:
        return draft_attention.attend(query, keys, values, mask)
    finally:
        draft_attention.TRITON_FROM = before


def _enable_gqa(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    out = scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
    return out.transpose(1, 2).contiguous()


def _kernel(**options: Any) -> Attention:
    from specdec.models.kernels.tree_attention import tree_attention, visible_range

    def attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        limits = draft_attention._once(mask, "range", visible_range)
        return tree_attention(query, keys, values, mask[:, 0], *limits, DIMS**-0.5, **options)

    return attention


def _functions(nodes: int, filled: float, tiles: bool) -> Iterator[tuple[str, Attention]]:
    """Names and functions to measure. Only the kernel depends on how many slots are filled."""
    from specdec.models.kernels.tree_attention import Tiles

    if tiles:
        for sizes in OTHER_TILES[nodes]:
            yield "kernel {} x {}, {} warps, {} stages".format(*sizes), _kernel(tiles=Tiles(*sizes))
        for parts in (8, 16, 32, 64):
            yield f"kernel, {parts} parts", _kernel(parts=parts)
        return
    yield "kernel", _kernel()
    if filled > 0.5:
        yield "transformers", _transformers
        yield "packed", _packed
        yield "enable_gqa", _enable_gqa


def _mask_forms(nodes: int, slots: int, device: torch.device) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Names and functions of what is computed once per pass."""
    from specdec.models.kernels.tree_attention import visible_range

    mask = torch.ones(1, nodes, slots, dtype=torch.bool, device=device).tril(slots // 2)
    yield "visible_range", lambda: visible_range(mask)
    yield "additive mask", lambda: draft_attention._added(mask, torch.bfloat16, HEADS // KV_HEADS)


@app.command(help=__doc__)
@torch.no_grad()
def main(
    small: Annotated[bool, typer.Option(help="A few sizes on the CPU, by Triton's interpreter.")] = False,
    seconds: Annotated[float, typer.Option(help="Measure no further tiles after this time.")] = 45.0,
) -> None:
    start = perf_counter()
    if small:
        from tests.support import interpreted

        interpreted.mend()
    device, dtype = torch.device("cpu" if small else "cuda"), torch.float32 if small else torch.bfloat16
    all_slots, all_nodes = ((512,), (1, 8)) if small else ((512, 2048, 8192, 32768), (1, 8, 64))
    heads = 2 * KV_HEADS if small else HEADS
    print(f"{'nodes':>5} {'slots':>6} {'filled':>6} {'us':>9} {'floor':>7} {'error':>8}  function", flush=True)
    for tiles in (False, True):
        for slots in all_slots:
            for nodes in all_nodes:
                for filled in (0.9,) if tiles else (0.9, 0.1):
                    if tiles and perf_counter() - start > seconds:
                        return
                    case = Case(nodes, slots, max(filled, nodes / slots), device, dtype, heads)
                    for name, attention in _functions(nodes, filled, tiles):
                        _print(case, nodes, slots, filled, name, attention)
    if not small:
        for nodes, slots in ((8, 2048), (64, 32768)):
            for name, run in _mask_forms(nodes, slots, device):
                print(f"{nodes:5} {slots:6} {'':>6} {1e6 * _replayed(run):9.1f} {'':>7} {'':>8}  {name}", flush=True)
    print(f"{perf_counter() - start:.0f} s", flush=True)


def _print(case: Case, nodes: int, slots: int, filled: float, name: str, attention: Attention) -> None:
    start = f"{nodes:5} {slots:6} {filled:6.0%}"
    try:
        error, time = case.error(attention), case.microseconds(attention)
    except Exception as failure:  # one case must not end the others
        print(f"{start} {type(failure).__name__}: {str(failure)[:100]}  {name}", flush=True)
        return
    print(f"{start} {time:9.1f} {case.floor:7.2f} {error:8.1g}  {name}", flush=True)


if __name__ == "__main__":
    app()
