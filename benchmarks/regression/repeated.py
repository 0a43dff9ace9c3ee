"""Compare plain decoding, n-grams and a memory of earlier calls on repetitive calls, as agents make them.

    python -m benchmarks.regression.repeated --target PATH --dtype float32

Three jobs use text that comes with Python: repeated edits of one file, repeated queries of one table, and questions
about the same passages. All methods get the same calls in the same order, and take turns.
"""

from __future__ import annotations

import heapq
import inspect
import textwrap
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Annotated, Any

import typer
from transformers import AutoTokenizer, PreTrainedModel

from benchmarks.harness.script import Dtype, Proposers, conditions, load, prepare
from benchmarks.harness.table import table
from specdec.data.prompts import Prompt
from specdec.evaluation.methods import PLAIN, plain, speculative
from specdec.evaluation.timing import Call, pooled, time_call

app = typer.Typer(add_completion=False)


def edits() -> Iterator[str]:
    """Calls that each rename one more variable in the source of a function."""
    source = inspect.getsource(textwrap.TextWrapper._split_chunks) + inspect.getsource(textwrap.TextWrapper.fill)
    source += inspect.getsource(textwrap.dedent)
    names = ["text", "chunks", "margin", "indent", "lines", "line", "self", "indents", "width", "fill"]
    for name in names:
        yield (
            f"```python\n{source}```\nRename `{name}` to `{name}_new` everywhere in this file. Answer with the whole "
            "file and nothing else."
        )
        source = source.replace(name, f"{name}_new")


def queries() -> Iterator[str]:
    """Calls that each ask for another query of a table."""
    schema = (
        "CREATE TABLE orders (order_id INTEGER PRIMARY KEY, customer_name TEXT, country TEXT, ordered_on DATE, "
        "shipped_on DATE, product TEXT, quantity INTEGER, unit_price NUMERIC);"
    )
    wanted = [
        f"{what} {where}"
        for where in ("per country in 2024", "per product in 2023", "for Norway", "for orders shipped late")
        for what in (
            "the total revenue",
            "the number of orders",
            "the average quantity",
            "the five best customers by revenue",
            "the longest time between order and shipping",
        )
    ]
    for one in wanted:
        yield f"{schema}\n\nWrite one SQLite query: {one}. Order the rows. Answer with the query and nothing else."


def questions() -> Iterator[str]:
    """Calls that each ask another question about the same passages."""
    passages = "\n\n".join(
        filter(None, map(inspect.getdoc, (heapq.merge, heapq.nlargest, textwrap.wrap, textwrap.dedent)))
    )
    about = heapq.__about__  # type: ignore[attr-defined]
    asked = [
        "What is a heap, and which property do its entries keep?",
        "How does the tournament use the heap?",
        "Which function puts sorted inputs together, and what does it need of them?",
        "Why are heaps good for sorting on disk?",
        "What does textwrap.dedent do with tabs and spaces?",
        "How long are the lines that wrap makes?",
        "What does the text say about schedulers?",
        "Summarise the passages in three sentences.",
        "Which of these functions return lists?",
        "What is said about the memory that heaps take?",
    ]
    for one in asked:
        yield f"{about[:1800]}\n\n{passages}\n\nAnswer from the text above, and quote it: {one}"


JOBS: dict[str, Callable[[], Iterator[str]]] = {"edits": edits, "queries": queries, "questions": questions}


@app.command(help=__doc__)
def main(
    target: Annotated[str, typer.Option(help="Path or hub id of a chat model.")],
    proposer: Proposers = None,
    job: Annotated[list[str] | None, typer.Option(help=f"Jobs: {', '.join(JOBS)}. Default: all.")] = None,
    calls: Annotated[int, typer.Option(min=1, help="Maximum calls per job.")] = 20,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 96,
    dtype: Dtype = "auto",
) -> None:
    prepare()
    model = load(target, dtype)
    tokenizer = AutoTokenizer.from_pretrained(target)
    print(f"{conditions(model, max_new_tokens)}.\n")
    rows = [row for name in job or JOBS for row in compared(model, tokenizer, name, proposer, calls, max_new_tokens)]
    columns = ["job", "method", "calls", "s decoding", "speed-up", "whole calls", "tokens per pass", "plain's text"]
    print(table(columns, rows))


def compared(
    model: PreTrainedModel, tokenizer: Any, job: str, names: list[str] | None, calls: int, new: int
) -> Iterator[list[str]]:
    """Yield the rows of the table, after a warm-up call of each method with a prompt of another job."""
    methods = [plain(model), *(speculative(name, model, name) for name in names or ["ngram", "suffix"])]
    taken: dict[str, list[Call]] = {method.name: [] for method in methods}
    for method in methods:
        method.generate(**Prompt("warm up", "Count to twenty.").encode(tokenizer), max_new_tokens=8, do_sample=False)
    for text in islice(JOBS[job](), calls):
        inputs = Prompt(job, text).encode(tokenizer)
        for method in methods:
            taken[method.name].append(time_call(method, inputs, max_new_tokens=new, do_sample=False))
    totals = {
        name: (sum(call.seconds for call in calls), sum(call.decode_seconds for call in calls))
        for name, calls in taken.items()
    }
    whole, decoding = totals[PLAIN]
    for name, (seconds, later) in totals.items():
        same = sum(ours.texts == theirs.texts for ours, theirs in zip(taken[name], taken[PLAIN], strict=True))
        report = pooled(call.report for call in taken[name])
        tokens = f"{report.tokens_per_round:.2f}" if report.num_calls else "1"
        speeds = [f"{later:.1f}", f"{decoding / later:.2f}x", f"{whole / seconds:.2f}x"]
        yield [job, name, str(len(taken[name])), *speeds, tokens, f"{same} of {len(taken[name])}"]


if __name__ == "__main__":
    app()
