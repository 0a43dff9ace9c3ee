"""Measure the second turn of a conversation, with and without the first turn's cache.

    python -m benchmarks.regression.second_turn --target PATH --proposer ngram --proposer eagle3

Reports the time to the first token and of the whole call. With the cache only the new turn is read. All methods
continue the same first turn of plain decoding, and must write the same second one.
"""

from __future__ import annotations

import copy
from statistics import median
from typing import Annotated, Any

import torch
import typer
from transformers import AutoTokenizer

from benchmarks.harness.script import Dtype, Proposers, conditions, load, prepare
from benchmarks.harness.table import table
from specdec.data.prompts import PROMPTS, Prompt
from specdec.evaluation.methods import PLAIN, plain, speculative
from specdec.evaluation.timing import Call, time_call
from specdec.models.compat import CACHE, cache_in

SECOND_QUESTION = "Now say the same in two sentences."

app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    target: Annotated[str, typer.Option(help="Path or hub id of any causal LM.")],
    proposer: Proposers = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Minimum tokens of the first turn's prompt.")] = 600,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 48,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    dtype: Dtype = "auto",
) -> None:
    prepare()
    model = load(target, dtype)
    tokenizer = AutoTokenizer.from_pretrained(target)
    methods = [plain(model), *(speculative(f"specdec, {name}", model, name) for name in proposer or ["ngram"])]

    arguments = {"max_new_tokens": max_new_tokens, "do_sample": False, "eos_token_id": None}
    first = model.generate(**_first(tokenizer, prompt_tokens), **arguments, return_dict_in_generate=True)
    second = torch.cat([first.sequences, between_turns(tokenizer, SECOND_QUESTION)], 1)
    taken: dict[tuple[str, bool], list[Call]] = {}
    for repeat in range(repeats + 1):
        for method in methods:
            for cached in (False, True):
                cache = copy.deepcopy(cache_in(first)) if cached else None
                call = time_call(method, {"input_ids": second}, **{CACHE: cache}, **arguments)
                if repeat:  # the first one warms up
                    taken.setdefault((method.name, cached), []).append(call)

    print(f"{conditions(model, max_new_tokens)} a turn.")
    print(f"First turn {first.sequences.shape[1]} tokens, the second reads {second.shape[1]}; {repeats} repeats.\n")
    rows = []
    for (name, cached), calls in taken.items():
        same = "yes" if calls[-1].texts == taken[PLAIN, cached][-1].texts else "no"
        times = [call.time_to_first_token for call in calls], [call.seconds for call in calls]
        seconds = [f"{median(part):.2f}" for part in times]
        rows.append([name, "yes" if cached else "no", *seconds, same])
    print(table(["method", "first turn's cache", "s to the first token", "s in all", "plain's text"], rows))


def _first(tokenizer: Any, tokens: int) -> dict[str, torch.Tensor]:
    """Repeat the demo's prompts to a prompt of at least `length` tokens."""
    text = PROMPTS[-1].text
    while len(tokenizer(text)["input_ids"]) < tokens:
        text += "\n\n" + PROMPTS[len(text) % len(PROMPTS)].text
    return Prompt("first turn", text).encode(tokenizer)


def between_turns(tokenizer: Any, question: str) -> torch.Tensor:
    """Tokens between two answers, with the second one's question, (1, T) int64."""
    if tokenizer.chat_template is None:
        return tokenizer(question, return_tensors="pt")["input_ids"]
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "ANSWER"}]
    turns.append({"role": "user", "content": question})
    whole = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    return tokenizer(whole.rsplit("ANSWER", 1)[1], add_special_tokens=False, return_tensors="pt")["input_ids"]


if __name__ == "__main__":
    app()
