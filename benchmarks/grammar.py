"""Compare specdec with plain `generate()` on JSON output, both with xgrammar's logits processor, taking turns.

    python benchmarks/grammar.py --target PATH --proposer ngram --proposer auto --proposer draft:PATH

Decoding is greedy. Every prompt asks for the facts of a short text as JSON of one schema. Texts are compared with those
of plain decoding.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from time import perf_counter
from typing import Annotated, Any

import machine
import torch
import typer
import xgrammar
from table import table
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging
from xgrammar.contrib.hf import LogitsProcessor

from specdec import SpeculativeGenerator
from specdec.data.prompts import Prompt

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


@dataclass
class Taken:
    """Total seconds and texts of one method's calls."""

    seconds: float = 0.0
    texts: list[list[int]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.texts))


@app.command(help=__doc__)
def main(
    target: Annotated[str, typer.Option(help="Path or hub id of a chat model.")],
    proposer: Annotated[
        list[str] | None, typer.Option(help="Proposer, in the format of SpeculativeGenerator; may be repeated.")
    ] = None,
    texts: Annotated[int, typer.Option(min=1, max=len(TEXTS), help="Maximum number of prompts.")] = len(TEXTS),
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 80,
    dtype: Annotated[str, typer.Option(help="Number format: auto (as saved), bfloat16 or float32.")] = "float32",
) -> None:
    logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(target)
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=model.config.vocab_size)
    grammar = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA), any_whitespace=False)
    specs = {name: SpeculativeGenerator(model, name, on_unsupported="error") for name in proposer or ["ngram"]}
    methods: dict[str, Any] = {"plain": model.generate, **{name: spec.generate for name, spec in specs.items()}}
    taken = {name: Taken() for name in methods}
    prompts = [Prompt("", _asked(text)).encode(tokenizer) for text in TEXTS[:texts]]

    def answer(name: str, inputs: dict[str, torch.Tensor], tokens: int) -> tuple[list[int], float]:
        processor = LogitsProcessor(grammar)  # one keeps its place in the grammar: it is good for one call
        start = perf_counter()
        output = methods[name](**inputs, do_sample=False, max_new_tokens=tokens, logits_processor=[processor])
        return output[0, inputs["input_ids"].shape[1] :].tolist(), perf_counter() - start

    for name in methods:
        answer(name, prompts[0], 12)  # is not counted
    for spec in specs.values():
        spec.report.reset()
    for inputs in prompts:
        for name, sums in taken.items():
            text, seconds = answer(name, inputs, max_new_tokens)
            sums.texts.append(text)
            sums.seconds += seconds

    plain = taken["plain"]
    parsed = sum(_is_json(tokenizer.decode(text, skip_special_tokens=True)) for text in plain.texts)
    print(f"{machine.cpu_model()}, {torch.get_num_threads()} threads, {model.dtype}, greedy, batch 1, whole calls.")
    print(f"{texts} texts, up to {max_new_tokens} new tokens each; {parsed} of plain decoding's are whole JSON.\n")
    rows = []
    for name, sums in taken.items():
        same = sum(a == b for a, b in zip(sums.texts, plain.texts, strict=True))
        per_pass = f"{specs[name].report.tokens_per_round:.2f}" if name in specs else "1.00"
        speeds = [
            f"{sums.tokens / sums.seconds:.2f}",
            f"{plain.seconds / plain.tokens * sums.tokens / sums.seconds:.2f}x",
        ]
        rows.append([name.partition(":")[0], *speeds, per_pass, f"{same} of {texts}"])
    print(table(["method", "tokens/s", "speed-up", "tokens a pass", "plain's text"], rows))


def _asked(text: str) -> str:
    return f"Give the facts of this text as JSON with the keys {', '.join(SCHEMA['required'])}.\n\n{text}"


def _is_json(text: str) -> bool:
    try:
        return set(json.loads(text)) == set(SCHEMA["required"])
    except json.JSONDecodeError:
        return False


if __name__ == "__main__":
    app()
