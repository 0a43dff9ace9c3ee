"""Measure how many tokens a head gets accepted after texts of several lengths, with and without a window.

    python -m benchmarks.regression.long_texts --target PATH --head PATH --text FILE --lengths 512,4096,16384

Each text file is read to the longest length. A shorter prompt is the end of it, so all lengths continue the same place.
The target continues it greedily. Then chains are drafted after every token of that answer, from the target's states,
once per window. A window is the number of the last tokens that the head sees; 0: all of them. With --sinks it also sees
that many of the first tokens (StreamingLLM, arXiv 2309.17453).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Annotated
from unittest.mock import patch

import torch
import typer
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from benchmarks.harness.script import Dtype, conditions, load, log, prepare
from benchmarks.harness.table import table
from specdec import Eagle3Proposer, SpeculativeGenerator
from specdec.heads.eagle3.head import Eagle3Head
from specdec.heads.eagle3.runner import HeadRunner
from specdec.heads.embeddings import BorrowedEmbeddings
from specdec.models.cache.buffers import Span
from specdec.models.cache.ragged_rows import VisibleSlots
from specdec.models.hidden_states import Taps

app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    target: Annotated[str, typer.Option(help="Path or hub id of the target.")],
    head: Annotated[str, typer.Option(help="Path or hub id of its EAGLE-3 head.")],
    text: Annotated[list[Path], typer.Option(help="Text file; may be repeated.", exists=True, dir_okay=False)],
    lengths: Annotated[str, typer.Option(help="Tokens of the prompts.")] = "512,1024,2048,4096,8192,16384",
    windows: Annotated[str, typer.Option(help="Windows of the head; 0: all tokens.")] = "0,512,1024,2048,4096",
    sinks: Annotated[int, typer.Option(min=0, help="First tokens that the head sees beside a window.")] = 0,
    draft_length: Annotated[int, typer.Option(min=1, help="Draft tokens per chain.")] = 4,
    max_new_tokens: Annotated[int, typer.Option(min=8)] = 96,
    dtype: Dtype = "auto",
) -> None:
    prepare()
    model, tokenizer = load(target, dtype), AutoTokenizer.from_pretrained(target)
    proposer, sizes = Eagle3Proposer(head), sorted(map(int, lengths.split(",")))
    proposer.check(model)
    texts = [tokenizer(file.read_text(encoding="utf-8"), return_tensors="pt")["input_ids"] for file in text]
    short = [str(file) for file, ids in zip(text, texts, strict=True) if ids.shape[1] < sizes[-1]]
    if short:
        raise typer.BadParameter(f"{short[0]} has fewer than {sizes[-1]} tokens", param_hint="--text")
    spans = [int(window) or None for window in windows.split(",")]
    beside = f", {sinks} sinks" if sinks else ""
    print(f"{conditions(model, max_new_tokens)}, chains of {draft_length}, {len(texts)} texts{beside}.\n")
    rows = []
    for length in sizes:
        found = {span: [0, 0, 0.0] for span in spans}  # accepted tokens, positions, seconds of the head's passes
        for ids in texts:
            log.print(f"{length} tokens")
            answered, states = _answer(model, proposer, ids[:, sizes[-1] - length : sizes[-1]], max_new_tokens)
            for span in spans:
                if span is None or span < length:
                    with patch.object(VisibleSlots, "_visible", _seeing_sinks(sinks)):
                        counts = _accepted(model, proposer, answered, states, length, span, draft_length, sinks > 0)
                    found[span] = [before + value for before, value in zip(found[span], counts, strict=True)]
        cells = [f"{1 + n / of:.2f} ({1e3 * s / of:.1f} ms)" if of else "" for n, of, s in found.values()]
        rows.append([f"{length:,}", *cells])
    print(table(["prompt", *("all" if span is None else f"the last {span:,}" for span in spans)], rows))


def _answer(model: PreTrainedModel, proposer: Eagle3Proposer, prompt: Tensor, new: int) -> tuple[Tensor, Tensor]:
    """The prompt with the target's greedy answer (1, T) int64, and the target's states (1, T, C) at all of it."""
    arguments = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    answered = SpeculativeGenerator(model, "ngram").generate(
        prompt, attention_mask=torch.ones_like(prompt), **arguments
    )
    taps = proposer.taps(model)
    listener = Taps(model, taps.at, proposer.head.device)
    with torch.no_grad(), listener.listening() as taken:
        model(answered, use_cache=False, logits_to_keep=1)
    return answered, listener.features(taken)


def _seeing_sinks(sinks: int) -> Callable[[VisibleSlots, Span], Tensor]:
    """`VisibleSlots._visible` with the first `sinks` tokens, which every token after them sees."""
    within = VisibleSlots._visible

    def visible(slots: VisibleSlots, span: Span) -> Tensor:
        held = slots.held(span)[:, None]
        return within(slots, span) | (held < sinks) & (held <= slots.positions[..., None])

    return visible


@torch.no_grad()
def _accepted(
    model: PreTrainedModel,
    proposer: Eagle3Proposer,
    text: Tensor,
    states: Tensor,
    prompt: int,
    window: int | None,
    steps: int,
    keeps_all: bool,
) -> tuple[int, int, float]:
    """Accepted tokens of chains after each token of the answer, number of chains, seconds to draft them."""
    head, before = proposer.head, proposer.head.config
    assert isinstance(head, Eagle3Head)
    head.config = replace(before, draft_window=window)
    try:
        runner = HeadRunner(head, BorrowedEmbeddings.by(model, head), proposer._fast)
    finally:
        head.config = before
    runner.start(1, keeps_all)
    ids, accepted, seconds, ends = head.draft_to_target, 0, 0.0, range(prompt, text.shape[1] - steps)
    first = 0
    for end in ends:  # the last known token
        start = perf_counter()
        logits = runner.extend(text[:, first + 1 : end + 1], states[:, first:end], [0])
        first, right, alike = end, text[0, end + 1 : end + 1 + steps].tolist(), True
        for step in range(steps):
            token = logits[:, -1].argmax(-1, keepdim=True)
            token = token if ids is None else ids[token]
            alike = alike and int(token) == right[step]
            accepted += alike
            if step + 1 < steps:
                logits = runner.grow(token, None, torch.arange(steps)[None], None, chain=True)
        runner.drop_draft()
        if end > ends[0]:  # the first one reads the prompt
            seconds += perf_counter() - start
    return accepted, len(ends), seconds


if __name__ == "__main__":
    app()
