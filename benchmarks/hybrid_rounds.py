"""Compare proposers on the target of hybrid_target.py: n-grams and its MTP layer, with chains and trees.

    python benchmarks/hybrid_rounds.py TARGET --batch-size 1 --batch-size 4
    python benchmarks/hybrid_rounds.py TARGET --head HEAD       # with an EAGLE-3 head, trained by `specdec train`

Measures the speed, whether the texts equal plain decoding's, and the share of time spent on rolling recurrent states
back to the accepted tokens. Prompts are pieces of the target's training text. With `--cycles 2,3,5` economize is
measured, too, with each of these cycle lengths (it drafts one token less). economize 0.3.2 runs such targets with
transformers 5.17, but not with 5.23.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import machine
import torch
import typer
from hybrid_target import TEXT
from identity import compare_texts
from methods import PLAIN, Method, speculative
from prompts import Job
from summary import summarise
from table import detail_table, percent, table, times
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging
from turns import take_turns

from specdec import DynamicTree, Eagle3Proposer, HybridProposer, MtpProposer, NgramProposer, Proposer
from specdec.models.cache.recurrent_states import States

app = typer.Typer(add_completion=False)


class Settling:
    """Seconds spent in `States.settle` and in whole calls, by method."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.whole: dict[str, float] = defaultdict(float)
        self._method = ""

    def of(self, method: Method) -> Method:
        def generate(**kwargs: Any) -> Any:
            self._method, start = method.name, perf_counter()
            output = method.generate(**kwargs)
            self.whole[method.name] += perf_counter() - start
            return output

        return Method(method.name, generate, method.report)

    def watch(self) -> None:
        settle = States.settle

        def timed(*args: Any, **kwargs: Any) -> None:
            start = perf_counter()
            settle(*args, **kwargs)
            self.seconds[self._method] += perf_counter() - start

        States.settle = timed  # type: ignore[method-assign]


def proposers(batch_size: int) -> dict[str, tuple[Proposer, int | None]]:
    """Return proposers by name, with their draft lengths."""
    mtp = MtpProposer()
    known: dict[str, tuple[Proposer, int | None]] = {"ngram": (NgramProposer(), None)}
    known |= {f"mtp, K = {k}": (mtp, k) for k in (1, 2, 3, 4)}
    known |= {"mtp": (mtp, None), "ngram+mtp": (HybridProposer(mtp), None)}
    if batch_size == 1:
        known["mtp, tree of 8"] = MtpProposer(tree=DynamicTree(depth=4, top_k=3, size=8)), 4
        known["mtp, tree as pays"] = MtpProposer(tree=DynamicTree(top_k=4)), None
    return known


def of_head(head: str, batch_size: int) -> dict[str, tuple[Proposer, int | None]]:
    """Return proposers of an EAGLE-3 head trained for the target, with their draft lengths."""
    if not head:
        return {}
    chain = Eagle3Proposer(head).shaped()
    known: dict[str, tuple[Proposer, int | None]] = {f"eagle3, K = {k}": (chain, k) for k in (1, 2, 3)}
    known |= {"eagle3": (chain, None), "ngram+eagle3": (HybridProposer(chain), None)}
    if batch_size == 1:
        known["eagle3, tree of 8"] = chain.shaped(tree=DynamicTree(depth=4, top_k=3, size=8)), 4
    return known


def economized(model: PreTrainedModel, target: Path, cycles: list[int]) -> list[Method]:
    """Return methods of economize, with its own lookup and with the target's MTP layer."""
    if not cycles:
        return []
    import economize
    from economize.techniques.lookup import LookupConfig

    methods = []
    for cycle in cycles:
        config = economize.DecodeConfig(cycle_length=cycle)
        lookup = economize.apply(model, LookupConfig(), decoding=config)
        mtp = economize.load(model, str(target), decoding=config)
        made = {f"economize lookup {cycle}": lookup, f"economize mtp {cycle}": mtp}
        methods += [Method(name, unstreamed(each.eval().generate)) for name, each in made.items()]
    return methods


def unstreamed(generate: Callable[..., Any]) -> Callable[..., Any]:
    """Remove the streamer in a batch, which economize does not support; there is then no time to first token."""

    def call(input_ids: Tensor, streamer: Any, **kwargs: Any) -> Any:
        more = {"streamer": streamer} if len(input_ids) == 1 else {}
        return generate(input_ids=input_ids, **kwargs, **more)

    return call


@app.command(help=__doc__)
def main(
    target: Annotated[Path, typer.Argument(exists=True, file_okay=False)],
    batch_size: Annotated[list[int], typer.Option(min=1)] = [1],  # noqa: B006
    calls: Annotated[int, typer.Option(min=1, help="Prompts per call; may be repeated.")] = 2,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 48,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 64,
    repeats: Annotated[int, typer.Option(min=1)] = 2,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    threads: Annotated[int | None, typer.Option(min=1)] = None,
    head: Annotated[str, typer.Option(help="Folder of an EAGLE-3 head for the target. Default: none.")] = "",
    cycles: Annotated[
        str, typer.Option(help="Cycle lengths of economize, separated by commas. Default: economize is not measured.")
    ] = "",
) -> None:
    logging.set_verbosity_error()
    if threads is not None:
        torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    text = torch.load(target / TEXT)
    # Not by `min_new_tokens`: that is a processor, which drafts are put through as well.
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    arguments: dict[str, Any] = {"max_new_tokens": max_new_tokens}
    arguments |= {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    generator = torch.Generator().manual_seed(0)
    size = sum(weight.numel() for weight in model.parameters()) / 1e6
    print(
        f"# A hybrid with an MTP layer, T = {temperature:g}\n\n{machine.cpu_model()}, "
        f"{torch.get_num_threads()} threads, float32: {model.config.num_hidden_layers} layers, {size:.1f}M parameters; "
        f"prompts of {prompt_tokens} tokens, "
        f"{max_new_tokens} new ones, {calls} calls, medians of {repeats} repeats.\n"
    )
    settling = Settling()
    settling.watch()
    differ = False
    for rows in batch_size:
        begins = torch.randint(len(text) - prompt_tokens, (calls, rows), generator=generator).tolist()
        jobs = [
            Job(str(i), "text", tuple(text[begin : begin + prompt_tokens] for begin in row))
            for i, row in enumerate(begins)
        ]
        made = [speculative(name, model, *how) for name, how in (proposers(rows) | of_head(head, rows)).items()]
        made += economized(model, target, [int(cycle) for cycle in cycles.split(",") if cycle])
        methods = [settling.of(method) for method in (Method(PLAIN, model.generate), *made)]
        records = take_turns(methods, model, jobs, arguments, repeats)
        identities = compare_texts(records, jobs, model) if temperature == 0 else {}
        summaries = summarise(records, [method.name for method in methods])
        lines = [
            [row.name, times(row.overall), percent(settling.seconds[row.name], settling.whole[row.name])]
            for row in summaries
        ]
        print(f"## Batch {rows}\n\n{table(['method', 'over plain', 'bringing states up'], lines)}\n")
        print(detail_table(summaries, identities) + "\n", flush=True)
        differ |= any(identity.differences for identity in identities.values())
    if differ:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
