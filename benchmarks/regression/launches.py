"""Count the host syncs, kernel launches and copies to the device in a round. Needs no GPU.

    python -m benchmarks.regression.launches
    python -m benchmarks.regression.launches --proposer "eagle3 tree" --where      # with source lines
    python -m benchmarks.regression.launches --recorded --max-new-tokens 60        # replayed rounds

Runs tiny models on a pretended device (`tests/support/pretend.py`). Counts outside of the models hold for any model,
except for work per layer (writing and moving keys and values). Counts inside are for 4 layers.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.harness.table import number, table

os.environ["SPECDEC_KEEP_COSTS"] = "0"

from tests.support import launches, pretend

HEADER = ["proposer", "length", "T", "batch", "waits", "uploads", "kernels outside", "draft's", "target's"]

app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    proposer: Annotated[str | None, typer.Option(help="Run only this proposer.")] = None,
    where: Annotated[bool, typer.Option(help="Print the lines that sync and launch, outside of the models.")] = False,
    recorded: Annotated[bool, typer.Option(help="Count rounds that replay captured drafts and passes.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=4)] = 24,
    out: Annotated[Path | None, typer.Option(help="Markdown file to write, too.")] = None,
) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    lines = []
    for name in launches.PROPOSERS if proposer is None else [proposer]:
        for automatic in (False, True):
            for sampling in (False, True):
                for batch_size in (1, 8):
                    spec = launches.generator(name, automatic)
                    spec.compile = "auto" if recorded else False
                    given = launches.prompts(batch_size, short=recorded)
                    books = launches.counted(spec, do_sample=sampling, max_new_tokens=max_new_tokens, **given)
                    if recorded:
                        books = launches.replaying(books, name)
                    length = "automatic" if automatic else "set"
                    lines.append([name, length, f"{sampling:d}", f"{batch_size}", *counts(books)])
                    if where:
                        print(*lines[-1])
                        print_places(books)
    text = table(HEADER, lines)
    print(text)
    if out is not None:
        out.write_text(f"{text}\n")


def counts(books: list[pretend.Ledger]) -> list[str]:
    """Mean counts over rounds with a draft."""
    if not books:
        return ["-"] * 5
    kernels = [launches.mean(books, "launches", part) for part in (launches.OUTSIDE, launches.DRAFT, launches.TARGET)]
    return [number(figure) for figure in (launches.mean(books, "waits"), launches.mean(books, "uploads"), *kernels)]


def print_places(books: list[pretend.Ledger]) -> None:
    for kind in ("waits", "uploads", "launches"):
        total: Counter = Counter()
        for book in books:
            for (what, region, place), times in getattr(book, kind).items():
                if kind != "launches" or region == launches.OUTSIDE:
                    total[place, what] += times
        for (place, what), times in sorted(total.items(), key=lambda item: -item[1]):
            print(f"    {kind} {times / len(books):6.2f}  {place}  {what}")


if __name__ == "__main__":
    app()
