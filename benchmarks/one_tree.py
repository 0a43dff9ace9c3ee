"""Count the tokens that lookups would add to another proposer's rounds, if both drafts were in one tree.

    python benchmarks/one_tree.py --target PATH --draft draft:PATH --prompts questions.jsonl

Texts are written with both proposers in turn. In each round that the other proposer drafted, a lookup drafts its
longest chain, too, and its correct tokens beyond the other's accepted nodes are counted. This is the maximum gain of a
single tree, if its nodes were free. Except for the choice of proposer, the counts do not depend on the machine's load.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from lookups import METHODS, accepted_of, context_of
from options import Bench, Options
from table import number, percent, table
from transformers.utils import logging

from specdec import HybridProposer, SpeculativeGenerator
from specdec.engine.trace import RoundTrace
from specdec.proposers.factory import as_proposer
from specdec.proposers.lookup.base import Lookup
from specdec.proposers.pacing.estimates import Estimates
from specdec.proposers.pacing.pacer import Pacer

LENGTH = 10  # tokens that a lookup drafts at most
COLUMNS = ["group", "lookup", "tokens per pass in turns", "its rounds", "in one tree at most", "more tokens"]
app = typer.Typer(add_completion=False)


@dataclass
class Counts:
    """Passes, passes drafted by the lookup, tokens, and additional tokens of one tree."""

    rounds: int = 0
    embed_tokens: int = 0
    tokens: int = 0
    more: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(mine + theirs for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True)))

    def row(self, group: str, name: str) -> list[str]:
        per_pass, gain = self.tokens / max(1, self.rounds), self.more / max(1, self.tokens)
        its = percent(self.embed_tokens, self.rounds)
        return [group, name, number(per_pass), its, number(per_pass * (1 + gain)), f"{100 * gain:.1f}%"]


@app.command(help=__doc__)
def main(
    target: Annotated[str, typer.Option(help="Path or hub id of the target.")],
    draft: Annotated[
        str, typer.Option(help='Proposer that takes turns with a lookup: "draft:PATH", "eagle3:PATH", ...')
    ],
    prompts: Annotated[Path, typer.Option(help="File of questions (JSONL).", exists=True, dir_okay=False)],
    per_category: Annotated[int, typer.Option(min=1, help="Prompts per group.")] = 3,
    max_new_tokens: Annotated[int, typer.Option(min=8)] = 96,
    dtype: Annotated[str, typer.Option(help="Number format: auto (as saved), bfloat16 or float32.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1)] = None,
) -> None:
    logging.set_verbosity_error()
    bench = Bench(
        Options(
            target,
            prompts,
            per_category=per_category,
            coding_apart=True,
            max_new_tokens=max_new_tokens,
            dtype=dtype,
            threads=threads,
        )
    )
    other, rows = as_proposer(draft, bench.target), []
    for name, make in METHODS.items():
        spec = SpeculativeGenerator(bench.target, HybridProposer(other, make()))
        found: dict[str, Counts] = {}
        for job in bench.jobs:
            prompt = job.prompts[0]
            with spec.watch() as rounds:
                spec.generate(prompt[None], max_new_tokens=max_new_tokens, do_sample=False)
            found[job.group] = found.get(job.group, Counts()) + counted(make(), prompt.tolist(), rounds)
        rows += [counts.row(group, name) for group, counts in found.items()]
        rows.append(sum(found.values(), Counts()).row("all", name))
    print(table(COLUMNS, rows))


def counted(lookup: Lookup, prompt: list[int], rounds: Sequence[RoundTrace]) -> Counts:
    """Count one text. A text without rounds ended with its first token, which the prefill gives."""
    first = [each.tokens[0] for each in rounds[:1]]
    text = prompt + first + [token for each in rounds for token in each.new_tokens]
    own = type(lookup).__name__
    counts = Counts(len(rounds), sum(each.drafted_by == own for each in rounds), len(text) - len(prompt + first))
    for each, right in zip(rounds, _right(lookup, text, len(prompt), rounds), strict=True):
        if each.drafted_by != own:
            counts.more += max(0, right - (len(each.path) - 1))
    return counts


def _right(lookup: Lookup, text: list[int], prompt: int, rounds: Sequence[RoundTrace]) -> Iterator[int]:
    """Number of correct tokens in the lookup's draft, for each round."""
    pacer = Pacer(LENGTH, Estimates())
    lookup.begin(context_of(text, prompt, prompt, pacer))
    for each in rounds:
        end = prompt + each.position
        yield accepted_of(lookup.propose(context_of(text, prompt, end, pacer)), text[end:])


if __name__ == "__main__":
    app()
