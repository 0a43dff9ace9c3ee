"""Time the GPU's 8-bit linear layer against torch's bfloat16 one, for the products of an EAGLE-3 head of an 8B model.

    python -m benchmarks.regression.int8_kernel --out int8.md                 # on a GPU: under 30 seconds
    TRITON_INTERPRET=1 python -m benchmarks.regression.int8_kernel --small    # on any machine, to test the script

Calls are replayed as one CUDA graph, over several copies of the weights that together exceed the GPU's cache. GB/s
counts the weights only. The last lines time all products of a step of the head.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.harness.table import number, table
from specdec.models.kernels.int8_linear import ONE_ROW, SEVERAL_ROWS, Tiles, int8_linear

SHAPES = {  # outputs and inputs
    "q": (4096, 8192),
    "lm_head": (32000, 4096),
    "gate, up": (14336, 4096),
    "down": (4096, 14336),
    "k, v": (1024, 8192),
    "o": (4096, 4096),
}
STEP = ("q", "k, v", "k, v", "o", "gate, up", "gate, up", "down", "lm_head")
SMALL = {"q": (96, 64), "lm_head": (200, 96)}
CACHE = 150_000_000  # bytes of weights that exceed a GPU's cache several times
ROWS = (1, 8, 16)
ONE = [
    ONE_ROW,
    Tiles(16, 512, 4, 3),
    Tiles(4, 1024, 4, 4),
    Tiles(8, 512, 2, 4),
    Tiles(8, 1024, 4, 1),
    Tiles(4, 2048, 8, 3),
]
SEVERAL = [SEVERAL_ROWS, Tiles(16, 512, 4, 4), Tiles(64, 128, 4, 5), Tiles(64, 256, 8, 4), Tiles(32, 128, 2, 6)]
HEADER = ["product", "rows", "kernel", "us", "GB/s", "over bfloat16", "largest error (standard deviations)"]

app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    small: Annotated[bool, typer.Option(help="Tiny shapes on the CPU, without times.")] = False,
    seconds: Annotated[float, typer.Option(help="Stop starting cases after so many seconds.")] = 25,
    out: Annotated[Path | None, typer.Option(help="Markdown file to write, too.")] = None,
) -> None:
    end, lines = time.monotonic() + seconds, []
    device = torch.device("cpu" if small else "cuda")
    torch.manual_seed(0)
    made = {name: Products(*shape, device) for name, shape in (SMALL if small else SHAPES).items()}
    for wanted in (slice(0, 1), slice(1, None)):  # the kernels in use first, then other tiles
        for name, product in made.items():
            for rows in ROWS:
                for tiles in (ONE if rows == 1 else SEVERAL)[wanted]:
                    if time.monotonic() < end:
                        for line in product.lines(name, rows, tiles):
                            lines.append(line)
                            print(*line, sep=" | ", flush=True)
    if not small:
        lines += list(step(made))
    text = table(HEADER, lines)
    print(text)
    if out is not None:
        out.write_text(f"{text}\n")


class Products:
    """The products of one shape with several copies of its weights.

    Args:
        outputs: outputs of the layer.
        inputs: inputs of the layer.
        device: CPU (no times) or CUDA.
    """

    def __init__(self, outputs: int, inputs: int, device: torch.device):
        self.device, self.timed = device, device.type == "cuda"
        self.dtype = torch.bfloat16 if self.timed else torch.float16  # Triton's interpreter rounds bfloat16 wrongly
        copies = 1 + CACHE // (outputs * inputs) if self.timed else 1
        quantized = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8, device=device)
        self.quantized = [quantized.clone() for _ in range(copies)]
        self.scale = (torch.rand(outputs, device=device) * 1e-3 + 1e-4).to(self.dtype)
        weight = (quantized.float() * self.scale.float()[:, None]).to(self.dtype)
        self.weights = [weight.clone() for _ in range(1 + copies // 2)]
        self.plain: dict[int, float] = {}  # microseconds of torch's product, by rows

    def lines(self, name: str, rows: int, tiles: Tiles) -> Iterator[list[str]]:
        """Table lines of torch's product, once per number of rows, and of ours."""
        x = torch.randn(rows, self.weights[0].shape[1], device=self.device).to(self.dtype)
        if self.timed and rows not in self.plain:
            self.plain[rows] = microseconds([lambda w=w: linear(x, w) for w in self.weights])
            yield self._line(name, rows, "torch, bfloat16", self.plain[rows], 2, "")
        try:
            ours = int8_linear(x, self.quantized[0], self.scale, tiles=tiles)
            right = x.double() @ (self.quantized[0].double() * self.scale.double()[:, None]).T
            error = f"{float((ours.double() - right).abs().max() / right.std()):.1e}"
            took = 0.0
            if self.timed:
                took = microseconds([lambda q=q: int8_linear(x, q, self.scale, tiles=tiles) for q in self.quantized])
            yield self._line(name, rows, " ".join(map(str, tiles)), took, 1, error)
        except Exception as failed:  # the other cases still count
            yield [
                name,
                str(rows),
                " ".join(map(str, tiles)),
                *["-"] * 3,
                f"{type(failed).__name__}: {str(failed)[:80]}",
            ]

    def _line(self, name: str, rows: int, kernel: str, took: float, size: int, error: str) -> list[str]:
        if not self.timed:
            return [name, str(rows), kernel, *["-"] * 3, error]
        rate = size * self.quantized[0].numel() / took / 1e3
        return [name, str(rows), kernel, number(took), number(rate), number(self.plain[rows] / took), error]


def step(made: dict[str, Products]) -> Iterator[list[str]]:
    """Table lines of all products of a step of the head, which run one after the other."""
    known = [made[name] for name in STEP]
    for rows in ROWS:
        xs = [torch.randn(rows, product.weights[0].shape[1], device="cuda").to(product.dtype) for product in known]
        plain = [lambda x=x, p=p: linear(x, p.weights[0]) for x, p in zip(xs, known, strict=True)]
        ours = [lambda x=x, p=p: int8_linear(x, p.quantized[0], p.scale) for x, p in zip(xs, known, strict=True)]
        try:
            whole, quick = (microseconds(calls) * len(known) for calls in (plain, ours))
            yield ["step", str(rows), "torch, bfloat16", number(whole), "", "1", ""]
            yield ["step", str(rows), "as in use", number(quick), "", number(whole / quick), ""]
        except Exception as failed:
            yield ["step", str(rows), "as in use", *["-"] * 3, f"{type(failed).__name__}: {str(failed)[:80]}"]


def microseconds(calls: list[Callable[[], Tensor]], replays: int = 10) -> float:
    """Microseconds per call of calls in a CUDA graph."""
    for call in calls[:2]:  # compiles
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(1 + 20 // len(calls)):
            for call in calls:
                call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * start.elapsed_time(end) / (replays * (1 + 20 // len(calls)) * len(calls))


if __name__ == "__main__":
    app()
