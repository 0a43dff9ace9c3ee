"""Measure the host time per round for which a GPU would wait: from the verdict to the next launch. Needs no GPU.

    python -m benchmarks.regression.host_time

Runs tiny models on the CPU. Captured functions return their earlier results at once, so what remains of a round is the
host's work, including the small tensors that it prepares. A head's draft is launched before the verdict has arrived, so
that the device drafts in the meantime.
"""

from __future__ import annotations

import os
import statistics
import warnings
from collections.abc import Callable, Hashable, Mapping
from itertools import pairwise
from time import perf_counter
from typing import Any

import pytest
import torch
import typer

from benchmarks.harness.table import table

os.environ["SPECDEC_KEEP_COSTS"] = "0"

from specdec import DraftModelProposer, DynamicTree, Eagle3Proposer, NgramProposer, SpeculativeGenerator
from specdec.engine import rules, speculation, verifier
from specdec.models import cuda_graphs, static_forward
from specdec.sampling.results import HostResult, RoundResult
from tests.support import eagle3, tiny

NEW, LENGTH = 400, 5

app = typer.Typer(add_completion=False)
arrivals: list[tuple[str, float]] = []


class Remembering(cuda_graphs.Recorder):
    """A recorder whose replays cost nothing and return an earlier result of the function."""

    def __init__(self, known: Any = None) -> None:
        super().__init__()
        self._gave: dict[Hashable, tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = {}

    def __call__(
        self, where: Hashable, key: Hashable, function: Callable[..., Any], inputs: Mapping[str, torch.Tensor]
    ) -> Any:
        key = (key, *((name, given.shape) for name, given in inputs.items()))
        if key in self._gave:
            memory, gives = self._gave[key]
            for name, given in inputs.items():
                memory[name].copy_(given)
            arrivals.append(("launch", perf_counter()))
            return gives
        made = function(**inputs)
        runs = self._runs[key] = self._runs.get(key, 0) + 1
        if runs > cuda_graphs.WARM:
            self._gave[key] = tuple({name: given.clone() for name, given in part.items()} for part in (inputs, made))
        return made


@app.command(help=__doc__)
def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    switch_on(pytest.MonkeyPatch())
    rows = [
        [name, f"{batch_size}", f"{sampling:d}", f"{1e3 * host_seconds(spec, batch_size, sampling):.2f}"]
        for name, spec in generators().items()
        for batch_size in (1, 8)
        for sampling in (False, True)
    ]
    print(table(["proposer", "batch", "T", "ms"], rows))


def switch_on(patch: pytest.MonkeyPatch) -> None:
    """Use capture and batched verification as on a GPU, and record when results arrive."""
    patch.setattr(speculation, "Recorder", Remembering)
    patch.setattr(speculation.Speculation, "_launches", True)
    patch.setattr(rules, "SequentialVerifier", verifier.BatchedVerifier)
    patch.setattr(static_forward, "_compiled", lambda: static_forward._pass)
    host = RoundResult.host

    def noted(result: RoundResult) -> HostResult:
        if "_host" not in vars(result):  # the first call waits
            arrivals.append(("arrival", perf_counter()))
        return host(result)

    patch.setattr(RoundResult, "host", noted)


def generators() -> dict[str, SpeculativeGenerator]:
    target, tree = tiny.model("llama", max_position_embeddings=2 * NEW), DynamicTree(depth=8, top_k=8, size=60)
    proposers = {
        "ngram": NgramProposer(),
        "draft chain": DraftModelProposer(target),
        "eagle3 chain": Eagle3Proposer(eagle3.head()).shaped(),
        "eagle3 tree": Eagle3Proposer(eagle3.head(), tree=tree),
    }
    return {
        name: SpeculativeGenerator(target, proposer, compile=True, draft_length=8 if "tree" in name else LENGTH)
        for name, proposer in proposers.items()
    }


def host_seconds(spec: SpeculativeGenerator, batch_size: int, sampling: bool) -> float:
    """Median host seconds over the rounds of a call whose draft and pass are replayed."""
    given = {"do_sample": sampling, "max_new_tokens": NEW} | tiny.prompts(*(9 + 2 * (b % 4) for b in range(batch_size)))
    spec.generate(**given)
    arrivals.clear()
    spec.generate(**given)
    pairs = pairwise(arrivals)
    return statistics.median(after - at for (what, at), (then, after) in pairs if (what, then) == ("arrival", "launch"))


if __name__ == "__main__":
    app()
