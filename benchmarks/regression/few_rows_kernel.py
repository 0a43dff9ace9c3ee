"""Time the kernels for products of few rows against torch's products, for the layers of an 8B and a 4B model.

    python -m benchmarks.regression.few_rows_kernel --out few_rows.md             # on a GPU: under 45 seconds
    TRITON_INTERPRET=1 python -m benchmarks.regression.few_rows_kernel --small    # on any machine, to test the script

Calls are replayed as one CUDA graph, over several copies of the weights that together exceed the GPU's cache. GB/s
counts the weights only. Torch runs one product for each weight, and the kernel of the activation after gate and up.
Errors are the largest difference from float64, in last bits of the value or of the mean, whichever is larger. The last
table has the fastest tiles of each product, also with an early start ("True"), and the products of a layer together.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn.functional import linear, silu

from benchmarks.harness.table import number, table
from specdec.models.kernels.activation import SILU, gated
from specdec.models.kernels.few_rows import DOWN, GATE, OUT, QKV, TILES, Tiles, joined_gate, joined_linear
from specdec.models.kernels.rms_norm import Norm, normalized

HEAD = "LM head"
SHAPES: dict[str, dict[str, tuple[tuple[int, ...], int]]] = {  # outputs of each weight, and inputs
    "8B": {
        QKV: ((4096, 1024, 1024), 4096),
        GATE: ((14336, 14336), 4096),
        OUT: ((4096,), 4096),
        DOWN: ((4096,), 14336),
        HEAD: ((128256,), 4096),
    },
    "4B": {
        QKV: ((4096, 1024, 1024), 2560),
        GATE: ((9728, 9728), 2560),
        OUT: ((2560,), 4096),
        DOWN: ((2560,), 9728),
    },
}
SMALL: dict[str, dict[str, tuple[tuple[int, ...], int]]] = {
    "tiny": {QKV: ((48, 16, 20), 72), GATE: ((40, 40), 64), DOWN: ((24,), 96)}
}
CACHE = 150_000_000  # bytes of weights that exceed a GPU's cache several times
ROWS = (8, 16, 1)
LAST = 12  # seconds for the last table
PRODUCTS = [
    Tiles(32, 256, 4, 5),
    Tiles(16, 512, 4, 4),
    Tiles(16, 256, 4, 5),
    Tiles(32, 128, 4, 6),
    Tiles(32, 256, 8, 6),
    Tiles(64, 128, 4, 5),
    Tiles(64, 256, 8, 4),
    Tiles(16, 512, 2, 4),
    Tiles(128, 64, 4, 6),
]
GATES = [
    Tiles(32, 128, 4, 4),
    Tiles(16, 256, 4, 4),
    Tiles(16, 128, 4, 5),
    Tiles(32, 128, 8, 5),
    Tiles(32, 256, 8, 4),
    Tiles(64, 64, 4, 5),
    Tiles(64, 128, 8, 4),
    Tiles(32, 64, 4, 6),
    Tiles(32, 128, 4, 3),
]
HEADER = ["model", "product", "rows", "kernel", "us", "GB/s", "over torch", "error, last bits"]

Call = Callable[[list[Tensor]], Any]
app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    small: Annotated[bool, typer.Option(help="Tiny shapes on the CPU, without times.")] = False,
    seconds: Annotated[float, typer.Option(help="Stop starting cases after so many seconds.")] = 40,
    out: Annotated[Path | None, typer.Option(help="Markdown file to write, too.")] = None,
) -> None:
    end = time.monotonic() + seconds
    lines: list[list[str]] = []
    device = torch.device("cpu" if small else "cuda")
    torch.manual_seed(0)
    with torch.no_grad():
        made = {
            (model, name): Product(name, *shape, device)
            for model, shapes in (SMALL if small else SHAPES).items()
            for name, shape in shapes.items()
        }
        fastest: dict[tuple[str, str, int], list[Tiles]] = {}
        for rows in ROWS:
            for key, product in made.items():
                found = product.lines(rows, end - LAST * (not small))
                lines += [[*key, *line] for line in found.values()]
                worked = {tiles: float(line[2]) for tiles, line in found.items() if tiles and line[2] != "-"}
                fastest[(*key, rows)] = sorted(worked, key=worked.__getitem__)[:3]
        best = []
        for (model, name, rows), tiles in fastest.items():  # last, since a failed launch may stop all that follow
            product = made[model, name]
            for early in [*tiles[:1], *(given._replace(early=True) for given in tiles)]:
                if time.monotonic() < end:
                    best.append([model, name, *product.of(early, rows)])
        for model in SMALL if small else SHAPES:
            best += layer(model, {name: made[of, name] for of, name in made if of == model}, fastest, small)
    text = "\n\n".join([table(HEADER, lines), table(HEADER, best)])
    print(f"\n{text}\n\n{time.monotonic() - end + seconds:.0f} s")
    if out is not None:
        out.write_text(f"{text}\n")


def layer(
    model: str, made: dict[str, Product], fastest: dict[tuple[str, str, int], list[Tiles]], small: bool
) -> list[list[str]]:
    """Table lines of the products of a decoder layer with 8 rows, one after the other, with a norm before the first."""
    uses, rows = [QKV, OUT, GATE, DOWN] if OUT in made else [QKV, GATE, DOWN], ROWS[0]
    products = [made[name] for name in uses]
    xs = [product.rows(rows) for product in products]
    norm = Norm(torch.ones_like(xs[0][0]), 1e-6)
    lines, plain = [], 0.0
    for kernel in ("torch", "fastest", "fastest, early"):
        tiles = [next(iter(fastest[model, name, rows]), None) for name in uses]
        if kernel == "torch" or None in tiles:
            calls = [partial(product.torch, x) for product, x in zip(products, xs, strict=True)]
        else:
            chosen = [given._replace(early=kernel != "fastest") for given in tiles if given]
            calls = [product.kernel(x, given) for product, x, given in zip(products, xs, chosen, strict=True)]

        def run(copy: int, calls: list[Call] = calls) -> None:
            normalized(xs[0], norm)
            for product, call in zip(products, calls, strict=True):
                call(product.copies[copy % len(product.copies)])

        try:
            if small:
                run(0)
                lines.append([model, "layer", str(rows), kernel, *["-"] * 4])
                continue
            took = microseconds([partial(run, copy) for copy in range(4)])
            plain, size = plain or took, sum(product.bytes for product in products)
            lines.append(
                [model, "layer", str(rows), kernel, f"{took:.2f}", number(size / took / 1e3), number(plain / took), ""]
            )
        except Exception as failed:  # the other cases still count
            lines.append([model, "layer", str(rows), kernel, *["-"] * 3, first_line(failed)])
        print(*lines[-1], sep=" | ", flush=True)
    return lines


class Product:
    """A product of a model's layers, with several copies of the weights.

    Args:
        name: a use of the kernels, or `HEAD`.
        sizes: outputs of each weight.
        inputs: inputs of all.
        device: CPU (no times) or CUDA.
    """

    def __init__(self, name: str, sizes: tuple[int, ...], inputs: int, device: torch.device):
        self.name, self.device, self.timed = name, device, device.type == "cuda"
        self.dtype = torch.bfloat16 if self.timed else torch.float16  # Triton's interpreter rounds bfloat16 wrongly
        self.bytes = 2 * sum(sizes) * inputs
        new = [torch.randn(size, inputs, dtype=self.dtype, device=device).mul_(inputs**-0.5) for size in sizes]
        self.copies = [new, *([weight.clone() for weight in new] for _ in range(CACHE // self.bytes * self.timed))]
        self.plain: dict[int, float] = {}  # microseconds of torch's products, by rows

    def rows(self, count: int) -> Tensor:
        """Random rows (count, inputs)."""
        return torch.randn(count, self.copies[0][0].shape[1], dtype=self.dtype, device=self.device)

    def lines(self, rows: int, end: float) -> dict[Tiles | None, list[str]]:
        """Rows, kernel, time, rate, speed relative to torch's, and error, by tiles; None for torch's products."""
        known = [TILES[self.name]] if self.name in TILES else []
        wanted = [None, *known, *(GATES if self.name == GATE else PRODUCTS)]
        return {tiles: self.of(tiles, rows) for tiles in wanted if time.monotonic() < end}

    def of(self, tiles: Tiles | None, rows: int) -> list[str]:
        """The line of some tiles."""
        x, name = self.rows(rows), " ".join(map(str, tiles)).replace(" False", "") if tiles else "torch"
        call = self.kernel(x, tiles) if tiles else partial(self.torch, x)
        line = [str(rows), name, "-", "-", "-", ""]
        try:
            line[5] = f"{max(map(last_bits, call(self.copies[0]), self.exact(x))):.2f}"
            line[2] = "0"
            if self.timed:
                took = microseconds([partial(call, weights) for weights in self.copies])
                if tiles is None:
                    self.plain[rows] = took
                line[2:5] = [f"{took:.2f}", number(self.bytes / took / 1e3), number(self.plain[rows] / took)]
        except Exception as failed:  # the other cases still count
            line[2:] = ["-", "-", "-", first_line(failed)]
        print(f"{self.name} of {x.shape[1]}", *line, sep=" | ", flush=True)
        return line

    def torch(self, x: Tensor, weights: list[Tensor]) -> list[Tensor]:
        results = [linear(x, weight) for weight in weights]
        return [gated(*results, SILU)] if self.name == GATE else results

    def kernel(self, x: Tensor, tiles: Tiles) -> Call:
        if self.name == GATE:
            return lambda weights: [joined_gate(x, *weights, SILU, tiles=tiles)]
        return lambda weights: joined_linear(x, weights, tiles=tiles)

    def exact(self, x: Tensor) -> list[Tensor]:
        results = [x.double() @ weight.double().T for weight in self.copies[0]]
        if self.name != GATE:
            return results
        gate, up = (result.to(self.dtype).double() for result in results)
        return [silu(gate).to(self.dtype).double() * up]


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:100]


def last_bits(result: Tensor, exact: Tensor) -> float:
    """The largest error, in last bits of the exact value or of the mean absolute value, whichever is larger."""
    size = exact.abs().clamp(min=float(exact.abs().mean()))
    bit = 2.0 ** size.log2().floor() * torch.finfo(result.dtype).eps
    return float(((result.double() - exact).abs() / bit).max())


def microseconds(calls: list[Callable[[], Any]], replays: int = 5) -> float:
    """Microseconds per call of calls in a CUDA graph; the smallest of several replays."""
    for call in calls[:2]:  # compiles
        call()
    torch.cuda.synchronize()
    repeats = 1 + 20 // len(calls)
    graph, taken = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    graph.replay()
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(1e3 * start.elapsed_time(end) / (repeats * len(calls)))
    return min(taken)


if __name__ == "__main__":
    app()
