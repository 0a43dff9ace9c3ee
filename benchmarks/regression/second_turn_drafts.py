"""Measure what a head drafts in second turns, with the first turn's cache and without it.

    python -m benchmarks.regression.second_turn_drafts --target PATH --head PATH --prompts SPEC_BENCH.jsonl

Every conversation of two turns has its second turn answered three times in a row: all read at once, from the first
turn's cache, and from a copy of that cache. A copy has no memory of what the head has read.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer
from transformers import AutoTokenizer, DynamicCache

from benchmarks.harness.script import Dtype, conditions, load, log, prepare
from benchmarks.harness.table import table
from benchmarks.regression.second_turn import between_turns
from specdec import Eagle3Proposer
from specdec.evaluation.methods import speculative
from specdec.evaluation.timing import Call, pooled, time_call
from specdec.models.compat import CACHE

READ = ("all at once", "from the cache", "from a copy of the cache")

app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    target: Annotated[str, typer.Option(help="Path or hub id of the target.")],
    head: Annotated[str, typer.Option(help="Path or hub id of its EAGLE-3 head.")],
    prompts: Annotated[Path, typer.Option(help="Questions in Spec-Bench's format; those of two turns are used.")],
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of conversations.")] = 10,
    draft_length: Annotated[int, typer.Option(min=1, help="Tokens of the drafted chains.")] = 4,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 96,
    dtype: Dtype = "auto",
) -> None:
    prepare()
    model, tokenizer = load(target, dtype), AutoTokenizer.from_pretrained(target)
    chain = Eagle3Proposer(head, branching=(1,) * draft_length)
    method = speculative("specdec", model, chain, draft_length)
    entries = [json.loads(line)["turns"] for line in prompts.read_text(encoding="utf-8").split("\n") if line]
    conversations = [turns for turns in entries if len(turns) > 1][:limit]
    arguments = {"max_new_tokens": max_new_tokens, "do_sample": False}
    taken: dict[str, list[Call]] = {name: [] for name in READ}
    for number, (first, second, *_) in enumerate(conversations):
        log.print(f"conversation {number + 1} of {len(conversations)}")
        messages, cache = [{"role": "user", "content": first}], DynamicCache(config=model.config)
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
        said = method.generate(ids, attention_mask=torch.ones_like(ids), **{CACHE: cache}, **arguments)
        read = said[:, : cache.get_seq_length()]  # the last token is an end token, or of an answer that was cut
        inputs = {"input_ids": torch.cat([read, between_turns(tokenizer, second)], 1)}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        caches = dict(zip(READ, (None, cache, copy.deepcopy(cache)), strict=True))
        order = READ if number % 2 else tuple(reversed(READ))
        for name in order:
            taken[name].append(time_call(method, inputs, **{CACHE: caches[name]}, **arguments))
    print(
        f"{conditions(model, max_new_tokens)} a turn, chains of {draft_length}, {len(conversations)} conversations.\n"
    )
    rows = []
    for name, calls in taken.items():
        report = pooled(call.report for call in calls)
        same = sum(call.texts == other.texts for call, other in zip(calls, taken[READ[0]], strict=True))
        first_token = median(call.time_to_first_token for call in calls)
        in_all = sum(call.seconds for call in calls)
        tokens = f"{report.mean_acceptance_length:.3f}"
        rows.append([name, tokens, f"{first_token:.2f}", f"{in_all:.1f}", f"{same} of {len(calls)}"])
    print(table(["read", "tokens a round", "s to the first token", "s in all", "the first row's text"], rows))


if __name__ == "__main__":
    app()
