"""Measure JSON by grammar: plain decoding, and proposers with and without what the grammar forces.

    python -m benchmarks.regression.grammar --target PATH --proposer ngram --proposer draft:PATH

Greedy, xgrammar's processor in all methods, which take turns on every text. A proposer is measured twice: as it is, and
with the grammar unknown to it, when the processor is called on the text alone and nothing is drafted for it.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
import xgrammar
from torch import Tensor
from transformers import AutoTokenizer, LogitsProcessor
from xgrammar.contrib import hf

from benchmarks.harness.script import Dtype, Proposers, conditions, load, log, prepare
from benchmarks.harness.table import table
from specdec.data.prompts import Prompt
from specdec.evaluation.methods import Method, plain, speculative
from specdec.evaluation.timing import Call, pooled, time_call

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["person", "building", "ship", "book"]},
        "year": {"type": "integer"},
        "places": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 3},
        "still_there": {"type": "boolean"},
    },
    "required": ["name", "kind", "year", "places", "still_there"],
    "additionalProperties": False,
}
TEXTS = (
    "The lighthouse at Gull Point was built in 1871. It stands between Harlow and Stenby and is lit to this day.",
    "Martha Lind, born in Stenby in 1842, kept the light for sixty-one years and died in Harlow in 1912.",
    "The Northern Star, a three-master launched in 1866 in Aldwick, sailed to Bergen and Riga until she was lost.",
    "'A Keeper's Log', printed in London in 1921, tells of storms and of lamps; the town's library still has it.",
)

app = typer.Typer(add_completion=False)


class Unknown(LogitsProcessor):
    """A grammar's processor as one of an unknown class, which is called on the text alone."""

    def __init__(self, processor: LogitsProcessor):
        self._processor = processor

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self._processor(input_ids, scores)


@app.command(help=__doc__)
def main(
    target: Annotated[str, typer.Option(help="Path or hub id of a chat model.")],
    proposer: Proposers = None,
    texts: Annotated[int, typer.Option(min=1, max=len(TEXTS), help="Use the first so many.")] = len(TEXTS),
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 80,
    any_whitespace: Annotated[bool, typer.Option("--any-whitespace", help="Leave spaces to the model.")] = False,
    dtype: Dtype = "float32",
) -> None:
    prepare()
    model, tokenizer = load(target, dtype), AutoTokenizer.from_pretrained(target)
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=model.config.vocab_size)
    compiler = xgrammar.GrammarCompiler(info)
    grammar = compiler.compile_json_schema(json.dumps(SCHEMA), any_whitespace=any_whitespace)
    methods: dict[str, Method] = {"plain": plain(model)}
    for name in proposer or ["ngram"]:
        short = name.partition(":")[0]
        for label in (f"{short}, grammar unknown", short):
            methods[label] = speculative(label, model, name)
    prompts = [Prompt("", _asked(text)).encode(tokenizer) for text in TEXTS[:texts]]

    def answer(name: str, inputs: dict[str, Tensor], tokens: int) -> Call:
        processor = hf.LogitsProcessor(grammar)  # for one call
        known = Unknown(processor) if name.endswith("unknown") else processor
        return time_call(methods[name], inputs, do_sample=False, max_new_tokens=tokens, logits_processor=[known])

    for name in methods:
        answer(name, prompts[0], 12)  # is not counted
    calls: dict[str, list[Call]] = {name: [] for name in methods}
    for number, inputs in enumerate(prompts):
        log.print(f"text {number + 1} of {len(prompts)}")
        for name in methods:
            calls[name].append(answer(name, inputs, max_new_tokens))

    spaces = "any" if any_whitespace else "fixed"
    whole = sum(_is_json(tokenizer.decode(call.texts[0], skip_special_tokens=True)) for call in calls["plain"])
    print(f"{conditions(model, max_new_tokens)} at most, greedy, batch 1, whole calls, {spaces} whitespace.")
    print(f"{texts} texts; {whole} of plain decoding's are whole JSON.\n")
    seconds = {name: sum(call.seconds for call in made) for name, made in calls.items()}
    rows = []
    for name, made in calls.items():
        report = pooled(call.report for call in made)
        same = sum(call.texts == other.texts for call, other in zip(made, calls["plain"], strict=True))
        tokens = sum(call.num_tokens for call in made)
        speeds = [f"{tokens / seconds[name]:.2f}", f"{seconds['plain'] / seconds[name]:.2f}x"]
        per_pass = f"{report.tokens_per_round:.2f}" if report.num_rounds else "1.00"
        accepted = f"{report.draft_acceptance_rate:.0%}" if report.num_drafts else "-"
        rows.append([name, *speeds, per_pass, accepted, f"{same} of {texts}"])
    print(table(["method", "tokens/s", "speed-up", "tokens a pass", "accepted", "plain's text"], rows))


def _asked(text: str) -> str:
    return f"Give the facts of this text as JSON with the keys {', '.join(SCHEMA['required'])}.\n\n{text}"


def _is_json(text: str) -> bool:
    try:
        return set(json.loads(text)) == set(SCHEMA["required"])
    except json.JSONDecodeError:
        return False


if __name__ == "__main__":
    app()
