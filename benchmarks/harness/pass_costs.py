"""`pass_costs`: measures the seconds of a model's pass over several tokens."""

from __future__ import annotations

from statistics import median
from time import perf_counter

import torch
from transformers import PreTrainedModel

from specdec.models.capability import probe
from specdec.models.introspection import device_of
from specdec.models.runner import ModelRunner

SIZES = (1, 2, 4, 8, 12, 16, 24, 32)
CONTEXT, REPEATS = 300, 7  # tokens in the cache; passes of each size, after one warm-up pass


def pass_costs(runner: ModelRunner, batch_size: int) -> dict[int, float]:
    """Measure the median seconds of a pass over n draft tokens per row, by n, with all sizes in turn."""
    device = device_of(runner.model)
    vocab = runner.config.vocab_size
    generator = torch.Generator().manual_seed(0)

    def tokens(n: int) -> torch.Tensor:
        return torch.randint(vocab, (batch_size, n), generator=generator).to(device)

    runner.start(batch_size)
    runner.extend(tokens(CONTEXT), [0] * batch_size)
    taken: dict[int, list[float]] = {n: [] for n in SIZES}
    for _ in range(REPEATS + 1):
        for n in SIZES:
            draft = tokens(n)
            depth = torch.arange(n, device=device).expand(batch_size, n)
            seen = torch.ones(n, n, dtype=torch.bool, device=device).tril().expand(batch_size, n, n)
            start = perf_counter()
            logits = runner.grow(draft, depth, seen, chain=True).logits
            logits[0, 0, 0].item()  # on an accelerator, this waits for the pass
            taken[n].append(perf_counter() - start)
            runner.commit([0] * batch_size)
    return {n: median(seconds[1:]) for n, seconds in taken.items()}


def target_runner(model: PreTrainedModel) -> ModelRunner:
    """Make the runner with which a `SpeculativeGenerator` verifies."""
    return ModelRunner(model, probe(model).masks)
