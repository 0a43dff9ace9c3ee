"""Slowdowns of target passes while another program runs, as `tests/support/slowdowns.py` holds them.

    python -m benchmarks.regression.slowdowns qwen2.5-coder-0.5b-instruct --threads 1

Prints how many times longer than on the quiet machine each pass over one token took beside a program of so many
threads. Needs a machine that nothing else uses.
"""

from __future__ import annotations

import multiprocessing
import time
from statistics import median

import torch
import typer
from transformers import AutoModelForCausalLM, PreTrainedModel

from specdec.models.compat import CACHE


def passes(model: PreTrainedModel, count: int) -> list[float]:
    """Seconds of passes over one token, after one another, behind the same 100 tokens."""
    with torch.inference_mode():
        cache = getattr(model(torch.arange(100).unsqueeze(0), use_cache=True), CACHE)
        seconds = []
        for _ in range(count):
            start = time.perf_counter()
            model(torch.ones(1, 1, dtype=torch.long), **{CACHE: cache})
            seconds.append(time.perf_counter() - start)
            cache.crop(-1)
    return seconds


def load(threads: int) -> None:
    """Multiply matrices until the process is killed."""
    torch.set_num_threads(threads)
    matrix = torch.rand(512, 512)
    while True:
        matrix @ matrix


def main(target: str, threads: int = 1, count: int = 80) -> None:
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).eval()
    passes(model, 5)
    quiet = median(passes(model, 20))
    other = multiprocessing.get_context("spawn").Process(target=load, args=(threads,), daemon=True)
    other.start()
    time.sleep(5)  # it imports torch first
    slow = passes(model, count)
    other.kill()
    print(", ".join(f"{seconds / quiet:.2g}" for seconds in slow))


if __name__ == "__main__":
    typer.run(main)
