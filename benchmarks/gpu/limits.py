"""The machine: its software, and the bandwidth and launch times that bound all other measurements."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.calls import typical
from benchmarks.gpu.setting import LLAMA, Row, Setting
from benchmarks.harness import counting, machine

KERNELS = 1000
QUERY = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit,temperature.gpu"


def measure_machine(setting: Setting) -> Iterator[Row]:
    """Describe the machine, and measure its bandwidth, an empty kernel and the matrix products of the 8B shape."""
    if setting.cuda:
        yield {"table": "driver", **driver()}
    data = torch.ones(2**20 if setting.small else 2**31, dtype=torch.bfloat16, device=setting.device)
    seconds = typical(setting, data.sum, 9)
    row: Row = {"table": "bounds", "GB/s": data.nbytes / seconds / 1e9}
    del data
    one = torch.ones(1, device=setting.device)

    def chain() -> None:
        for _ in range(KERNELS):
            one.add_(1)

    row["us a kernel, launched"] = 1e6 * typical(setting, chain, 5) / KERNELS
    if setting.cuda:
        row["us a kernel, in a graph"] = 1e6 * typical(setting, graph_of(chain).replay, 9) / KERNELS
    yield row
    if setting.cuda:
        yield from matrix_products(setting)


def driver() -> Row:
    """Return what nvidia-smi says, and versions."""
    row: Row = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), **machine.describe()}
    row = {key: value for key, value in row.items() if value is not None}
    try:
        command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return row | {"nvidia-smi": type(error).__name__}
    return row | dict(zip(QUERY.split(","), said.splitlines()[0].split(", "), strict=False)) if said else row


def graph_of(work: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """Capture `work` as a CUDA graph."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def matrix_products(setting: Setting) -> Iterator[Row]:
    """Measure the products of a layer and of the LM head for 1, 8 and 64 tokens, as bandwidth of their weights."""
    shape = counting.SHAPES[LLAMA] | (counting.SMALL if setting.small else {})
    hidden, inner, vocab = shape["hidden_size"], shape["intermediate_size"], shape["vocab_size"]
    keys = hidden * shape["num_key_value_heads"] // shape["num_attention_heads"]
    sizes = {"q, o": (hidden, hidden), "k, v": (keys, hidden), "gate, up": (inner, hidden), "down": (hidden, inner)}
    for name, (out, into) in (sizes | {"LM head": (vocab, hidden)}).items():
        copies = max(1, 2**28 // (2 * out * into))  # several weights, as none stays in the device's cache
        weights = [torch.randn(out, into, dtype=torch.bfloat16, device=setting.device) for _ in range(copies)]
        row: Row = {"table": "matrix products, GB/s of their weights in a graph", "product": name}
        for tokens in (1, 8, 64):
            states = torch.randn(tokens, into, dtype=torch.bfloat16, device=setting.device)
            graph = graph_of(partial(products, states, weights))
            row[f"{tokens} tokens"] = sum(w.nbytes for w in weights) / typical(setting, graph.replay, 5) / 1e9
        yield row


def products(states: torch.Tensor, weights: list[torch.Tensor]) -> None:
    for weight in weights:
        torch.nn.functional.linear(states, weight)
