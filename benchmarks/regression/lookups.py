"""Count the draft tokens that lookups find in repetitive calls. The result does not depend on the machine.

    python -m benchmarks.regression.lookups --target PATH

The calls of repeated.py are answered once, or --texts gives answers. N-grams and the memory of earlier calls then draft
for these texts, with the real pacing but without a model: --costs gives the time of a pass, and drafts take no time.
"at most" is the result of a lookup that always chooses the best earlier occurrence of the text's last token. --matches
counts instead how often the next token is right by the length of the match.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoTokenizer, PreTrainedModel

from benchmarks.harness.script import Dtype, load, prepare
from benchmarks.harness.table import table
from benchmarks.regression.repeated import JOBS
from specdec import NgramProposer, SpeculativeGenerator, SuffixProposer
from specdec.data.prompts import Prompt
from specdec.proposers.context import CallState, Context
from specdec.proposers.lookup.base import LENGTHS, LIKELY, Lookup
from specdec.proposers.pacing.estimates import Estimates
from specdec.proposers.pacing.pacer import Pacer
from specdec.sampling.draft_tree import DraftTree
from specdec.utils.prefix import common_prefix

# Seconds of a pass over so many tokens, in passes over one: the 0.5B in bfloat16 on two cores with AVX-512 BF16.
COSTS = "1:1 2:0.98 4:0.97 8:1.07 12:1.25 16:1.31 24:1.56 32:1.73 64:2.6"
Call = tuple[list[int], list[int]]  # tokens of a prompt, and of the answer
METHODS: dict[str, Callable[[], Lookup]] = {"ngram": NgramProposer, "suffix": SuffixProposer}

app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    target: Annotated[str, typer.Option(help="Path or hub id of a chat model.")],
    job: Annotated[list[str] | None, typer.Option(help=f"Jobs: {', '.join(JOBS)}. Default: all.")] = None,
    calls: Annotated[int, typer.Option(min=1, help="Maximum calls per job.")] = 20,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 96,
    dtype: Dtype = "auto",
    texts: Annotated[
        Path | None,
        typer.Option(help="JSONL file with prompt, response and source of this model's answers, used instead of jobs."),
    ] = None,
    costs: Annotated[str, typer.Option(help="Cost of a pass as tokens:seconds, in ascending order.")] = COSTS,
    matches: Annotated[
        bool, typer.Option("--matches", help="Count correct tokens by the length of the match.")
    ] = False,
) -> None:
    prepare()
    tokenizer = AutoTokenizer.from_pretrained(target)
    if texts is not None:
        known = written(texts, tokenizer, calls, max_new_tokens)
    else:
        model = load(target, dtype)
        known = {name: answered(model, tokenizer, name, calls, max_new_tokens) for name in job or JOBS}
    if matches:
        print(table(["match", "tokens", "right"], by_match([call for them in known.values() for call in them])))
        return
    rows = [row for name, them in known.items() for row in counted(name, them, curve(costs))]
    print(table(["job", "method", "calls", "tokens per pass", "at most", "nodes", "speed-up"], rows))


def answered(model: PreTrainedModel, tokenizer: Any, job: str, calls: int, new: int) -> list[Call]:
    """Return the calls of a job with the model's answers."""
    spec, out = SpeculativeGenerator(model, "suffix"), []
    for text in islice(JOBS[job](), calls):
        inputs = Prompt(job, text).encode(tokenizer)
        output = spec.generate(**inputs, max_new_tokens=new, do_sample=False)[0].tolist()
        size = inputs["input_ids"].shape[1]
        out.append((output[:size], output[size:]))
    return out


def written(path: Path, tokenizer: Any, calls: int, new: int) -> dict[str, list[Call]]:
    """Read the first calls of each source from a file, skipping sampled answers."""
    out: dict[str, list[Call]] = {}
    for line in filter(None, path.read_text(encoding="utf-8").split("\n")):
        entry = json.loads(line)
        known = out.setdefault(entry.get("source", path.stem), [])
        answer = tokenizer(entry["response"], add_special_tokens=False)["input_ids"][:new]
        if len(known) < calls and len(answer) > 1 and not float(entry.get("temperature", 0)):
            prompt = Prompt("", entry["prompt"]).encode(tokenizer)["input_ids"][0].tolist()
            known.append((prompt, answer))
    return {source: known for source, known in out.items() if known}


def counted(job: str, calls: Sequence[Call], seconds: Callable[[int], float]) -> Iterator[list[str]]:
    """Yield the rows of the table."""
    bound = at_most(calls)
    for name, make in METHODS.items():
        lookup, estimates = make(), Estimates()
        rounds = [size for prompt, answer in calls for size in decoded(lookup, prompt, answer, seconds, estimates)]
        tokens = sum(len(answer) - 1 for _, answer in calls)  # the first comes with the prompt
        speed = tokens / sum(map(seconds, rounds))
        drafted = sum(rounds) / len(rounds) - 1
        figures = [f"{tokens / len(rounds):.2f}", f"{bound:.2f}", f"{drafted:.1f}", f"{speed:.2f}x"]
        yield [job, name, str(len(calls)), *figures]


def by_match(calls: Sequence[Call]) -> list[list[str]]:
    """Count checked and correct tokens by kind of match, for the first n-gram draft at every position of the answers.

    A token is checked if all draft tokens before it are correct.
    """
    checked, right = [0] * len(LIKELY), [0] * len(LIKELY)
    for prompt, answer in calls:
        proposer, text, pacer = NgramProposer(), prompt + answer, Pacer(None, Estimates())
        proposer.begin(context_of(text, len(prompt), len(prompt), pacer))
        for end in range(len(prompt) + 1, len(text) - 1):  # the last token would not be drafted
            proposer.expect(context_of(text, len(prompt), end, pacer))
            guess = proposer.guesses[0]
            if guess is not None:
                following = text[end:]
                same = common_prefix(guess.tokens, following)
                for place, (_, kind) in enumerate(guess.confidence_bins[: min(same + 1, len(following))]):
                    checked[kind] += 1
                    right[kind] += place < same
    names = [f"to {length}" for length in LENGTHS] + ["longer"]
    rates = [f"{some / every:.2f}" if every else "-" for some, every in zip(right, checked, strict=True)]
    return [[name, str(every), rate] for name, every, rate in zip(names, checked, rates, strict=True)]


def decoded(
    proposer: Lookup, prompt: list[int], answer: list[int], seconds: Callable[[int], float], estimates: Estimates
) -> list[int]:
    """Tokens of each pass needed to write the answer after its first token."""
    text, end, pacer = prompt + answer, len(prompt) + 1, Pacer(None, estimates)
    rounds: list[int] = []
    proposer.begin(context_of(text, len(prompt), len(prompt), pacer))
    while end < len(text):
        draft = proposer.propose(context_of(text, len(prompt), end, pacer))
        accepted = accepted_of(draft, text[end:-1])
        pacer.observe_passes(draft.size, 0.0, seconds(draft.size))
        pacer.observe_round(draft.size, 1, 1 + accepted)
        rounds.append(draft.size)
        end += 1 + accepted
    return rounds


def at_most(calls: Sequence[Call]) -> float:
    """Tokens per pass of a lookup that always chooses the best match in this call's text or earlier ones."""
    tokens, rounds = 0, 0
    before: list[list[int]] = []
    for prompt, answer in calls:
        text, end = prompt + answer, len(prompt) + 1
        while end < len(text):
            here, following = text[end - 1 : end + 1], text[end:-1]
            found = (other[at:] for other in [*before, text[:end]] for at in _places(other, here))
            gained = 1 + max((common_prefix(continuation, following) for continuation in found), default=0)
            tokens, rounds, end = tokens + gained, rounds + 1, end + gained
        before.append(text)
    return tokens / max(1, rounds)


def _places(text: list[int], pair: list[int]) -> list[int]:
    """Positions in `text` where an occurrence of the bigram `pair` ends."""
    return [i + 1 for i, token in enumerate(text[:-1]) if token == pair[0] and text[i + 1] == pair[1]]


def curve(costs: str) -> Callable[[int], float]:
    """Interpolate the seconds of a pass linearly between the given numbers of tokens."""
    known = [(int(tokens), float(taken)) for tokens, _, taken in (pair.partition(":") for pair in costs.split())]

    def seconds(tokens: int) -> float:
        for (low, less), (high, more) in pairwise(known):
            if tokens <= high:
                return less + (more - less) * (tokens - low) / (high - low)
        return known[-1][1] * tokens / known[-1][0]

    return seconds


def context_of(text: list[int], prompt: int, end: int, pacer: Pacer) -> Context:
    """Context of a single row with a known text: `prompt` tokens of prompt, and `end` tokens so far."""
    return Context(
        tokens=torch.tensor([text[:end]]),
        pads=[0],
        ends=[end],
        active=[True],
        budget=[max(0, len(text) - 1 - end)],
        sampling=False,
        chains_only=False,
        vocab_size=1 << 24,
        pacer=pacer,
        call=CallState(written=[text[prompt:end]]),
    )


def accepted_of(draft: DraftTree, following: list[int]) -> int:
    """Number of accepted nodes in the draft of a single row, given the tokens that follow."""
    tokens, parents = draft.tokens[0].tolist(), draft.parents[0].tolist()
    node = 0
    for depth, token in enumerate(following):
        right = [i for i in range(1, len(tokens)) if parents[i] == node and tokens[i] == token]
        if not right:
            return depth
        node = right[0]
    return len(following)


if __name__ == "__main__":
    app()
