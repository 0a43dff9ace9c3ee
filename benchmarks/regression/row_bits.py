"""Count the numbers of matrix products that depend on how many rows are multiplied together, on this CPU.

    python -m benchmarks.regression.row_bits --target qwen2.5-coder-0.5b-instruct --dtype bfloat16

For each shape of a model's linear layers, random rows are multiplied alone, padded to two with zeros, and together with
others. Exact calls within `spec.exact()` are fast where padded rows have the bits of rows among others.
"""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from torch import Tensor

from benchmarks.harness.script import Dtype, load
from benchmarks.harness.table import table
from specdec.models.exact.linear import one_by_one, together
from specdec.models.linear import is_plain

app = typer.Typer(add_completion=False)
ROWS = (2, 3, 5, 8, 16, 33, 64)


@torch.no_grad()
def differing(weight: Tensor, bias: Tensor | None, rows: int) -> list[int]:
    """Numbers compared, and how many of them differ from products of all `ROWS`: of single rows, and of padded ones."""
    x = torch.randn(1, max(ROWS), weight.shape[1]).to(weight.dtype)
    wrong = []
    for size in (1, 2):
        right = one_by_one(x[:, :rows], weight, bias, size)
        products = [together(x[:, :count], weight, bias)[:, :rows] for count in ROWS]
        wrong.append(sum(int((part != right[:, : part.shape[1]]).sum()) for part in products))
    return [sum(min(count, rows) for count in ROWS) * len(weight), *wrong]


@app.command()
def main(
    target: Annotated[str, typer.Option(help="Path or hub id of the model.")],
    dtype: Dtype = "bfloat16",
    rows: Annotated[int, typer.Option(help="Rows compared at each shape.")] = 16,
) -> None:
    """Print a table with one line for each shape."""
    torch.manual_seed(0)
    layers = {
        (layer.weight.shape, layer.bias is None): layer for layer in load(target, dtype).modules() if is_plain(layer)
    }
    lines = [
        [*(f"{size:,}" for size in (*layer.weight.shape[::-1], *differing(layer.weight, layer.bias, rows)))]
        for layer in layers.values()
    ]
    print(table(["inputs", "outputs", "numbers", "other bits than alone", "other bits than padded to two"], lines))


if __name__ == "__main__":
    app()
