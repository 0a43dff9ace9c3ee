"""Compare the cost of drafting with an EAGLE-3 head (one pass per token) and a DSpark drafter (one pass per block).

    python benchmarks/draft_cost.py --target PATH --threads 2

Both heads are untrained and have nearly the same number of weights, since the cost of a pass does not depend on their
values. The result is the number of tokens that a round must accept to be faster than plain decoding.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Annotated

import torch
import typer
from table import number, table
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from specdec import BlockProposer, Eagle3Proposer, Proposer, SpeculativeGenerator
from specdec.training.initialization.dflash import initialize_block
from specdec.training.initialization.eagle3 import initialize

DRAFTED = 8192  # tokens of the target's vocabulary
PROMPT, NEW = 200, 48

app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    target: Annotated[str, typer.Option(help="Path or hub id of the target.")],
    lengths: Annotated[str, typer.Option(help="Draft tokens per round, separated by commas.")] = "3,7",
    rounds: Annotated[int, typer.Option(min=1, help="Number of repeats.")] = 5,
    threads: Annotated[int | None, typer.Option(min=1)] = None,
) -> None:
    logging.set_verbosity_error()
    if threads is not None:
        torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(target, dtype="auto").eval()
    torch.manual_seed(0)
    ids = torch.randint(min(1000, model.config.vocab_size), (1, PROMPT))
    ways = list(drafting(model, [int(length) for length in lengths.split(",")]))
    plain: list[float] = []
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name, _, _ in ways}  # seconds of a draft, of a round
    for turn in range(1 + rounds):
        seconds = round_of(SpeculativeGenerator(model, "ngram", draft_length=0), ids)[1]
        costs = {name: round_of(spec, ids) for name, _, spec in ways}
        if turn:  # the first finds out how the model can be run
            plain.append(seconds)
            for name, cost in costs.items():
                spent[name].append(cost)
    once = median(plain)
    rows = []
    for name, weights, _ in ways:
        draft, whole = (median(part) for part in zip(*spent[name], strict=True))
        rows.append([name, number(weights / 1e6), number(1e3 * draft), number(1e3 * whole), number(whole / once)])
    print(f"plain decoding: {number(1e3 * once)} ms a token\n")
    print(table(["drafted by", "million weights", "ms a draft", "ms a round", "tokens a round that pay"], rows))


def drafting(model: PreTrainedModel, lengths: list[int]) -> Iterator[tuple[str, int, SpeculativeGenerator]]:
    """Yield the name, number of weights (including embeddings) and generator of each draft method."""
    vocab = torch.arange(DRAFTED)
    head = initialize(model, vocab).to(model.dtype).eval()
    for length in lengths:
        yield named(f"EAGLE-3, {length} in a chain", Eagle3Proposer(head, branching=(1,) * length), length, model)
    for length in lengths:
        drafter = initialize_block(model, vocab, 0, "dspark", length, intermediate_size=2048).to(model.dtype).eval()
        yield named(f"DSpark, a block of {length}", BlockProposer(drafter, branching=(1,) * length), length, model)


def named(name: str, proposer: Proposer, length: int, model: PreTrainedModel) -> tuple[str, int, SpeculativeGenerator]:
    head = proposer.drafting_model() or proposer.head  # type: ignore[attr-defined]
    weights = sum(weight.numel() for weight in head.parameters() if weight.dim() > 1)
    return name, weights, SpeculativeGenerator(model, proposer, draft_length=length)


def round_of(spec: SpeculativeGenerator, ids: torch.Tensor) -> tuple[float, float]:
    """Measure the mean seconds of a draft and of a round."""
    spec.generate(ids, do_sample=False, min_new_tokens=NEW, max_new_tokens=NEW)
    report = spec.last_report
    return report.seconds["draft"] / report.num_rounds, report.round_seconds / report.num_rounds


if __name__ == "__main__":
    app()
