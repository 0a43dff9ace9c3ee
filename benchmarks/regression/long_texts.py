"""Measure how many drafted tokens are accepted after texts of several lengths, with and without a window.

    python -m benchmarks.regression.long_texts --target PATH --head PATH --text FILE --lengths 512,4096,16384
    python -m benchmarks.regression.long_texts --target PATH --draft-model PATH --text FILE --lengths 512,4096,16384

Each text file is read to the longest length. A shorter prompt is the end of it, so all lengths continue the same place.
The target continues it greedily. Then a chain is drafted after every token of that answer, once per window: by an
EAGLE-3 head from the target's states, or by a draft model. A window is the number of the last tokens that the drafter
sees; 0: all of them. With --sinks a head also sees that many of the first tokens (StreamingLLM, arXiv 2309.17453).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, Protocol
from unittest.mock import patch

import torch
import typer
from torch import Tensor
from transformers import AutoTokenizer, DynamicCache, PreTrainedModel

from benchmarks.harness.script import Dtype, bad_input_ends, conditions, load, log, prepare
from benchmarks.harness.table import table
from specdec import Eagle3Proposer, SpeculativeGenerator
from specdec.heads.eagle3.head import Eagle3Head
from specdec.heads.eagle3.runner import HeadRunner
from specdec.heads.embeddings import BorrowedEmbeddings
from specdec.models.cache.buffers import Span
from specdec.models.cache.ragged_rows import VisibleSlots
from specdec.models.compat import CACHE
from specdec.models.draft_attention import with_draft_attention
from specdec.models.hidden_states import Taps
from specdec.models.linear import with_fast_linears

app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    target: Annotated[str, typer.Option(help="Path or hub id of the target.")],
    text: Annotated[list[Path], typer.Option(help="Text file; may be repeated.", exists=True, dir_okay=False)],
    head: Annotated[str | None, typer.Option(help="Path or hub id of its EAGLE-3 head.")] = None,
    draft_model: Annotated[str | None, typer.Option(help="Path or hub id of a draft model, instead of a head.")] = None,
    lengths: Annotated[str, typer.Option(help="Tokens of the prompts.")] = "512,1024,2048,4096,8192,16384",
    windows: Annotated[str, typer.Option(help="Windows of the drafter; 0: all tokens.")] = "0,512,1024,2048,4096",
    sinks: Annotated[int, typer.Option(min=0, help="First tokens that the head sees beside a window.")] = 0,
    draft_length: Annotated[int, typer.Option(min=1, help="Draft tokens per chain.")] = 4,
    max_new_tokens: Annotated[int, typer.Option(min=8)] = 96,
    dtype: Dtype = "auto",
    plot: Annotated[Path | None, typer.Option(help="Chart to write: .svg or .png.")] = None,
) -> None:
    if (head is None) == (draft_model is None):
        raise typer.BadParameter("give --head or --draft-model")
    if draft_model is not None and sinks:
        raise typer.BadParameter("sinks are measured for heads alone", param_hint="--sinks")
    prepare()
    with bad_input_ends():
        model, tokenizer, sizes = load(target, dtype), AutoTokenizer.from_pretrained(target), _numbers(lengths)
        drafter = HeadChains(model, head, sinks) if head else ModelChains(load(str(draft_model), dtype))
    texts = [tokenizer(file.read_text(encoding="utf-8"), return_tensors="pt")["input_ids"] for file in text]
    short = [str(file) for file, ids in zip(text, texts, strict=True) if ids.shape[1] < sizes[-1]]
    if short:
        raise typer.BadParameter(f"{short[0]} has fewer than {sizes[-1]} tokens", param_hint="--text")
    spans = [window or None for window in _numbers(windows)]
    beside = f", {sinks} sinks" if sinks else ""
    print(f"{conditions(model, max_new_tokens)}, chains of {draft_length}, {len(texts)} texts{beside}.\n")
    found: dict[tuple[int, int | None], tuple[float, float]] = {}  # tokens per round and ms per chain
    for length in sizes:
        totals = {span: [0, 0, 0.0] for span in spans if span is None or span < length}
        for ids in texts:
            log.print(f"{length} tokens")
            answered = _answer(model, ids[:, sizes[-1] - length : sizes[-1]], max_new_tokens)
            drafter.read(answered)
            for span, total in totals.items():
                counts = _accepted(drafter, answered, length, span, draft_length)
                totals[span] = [before + value for before, value in zip(total, counts, strict=True)]
        found |= {(length, span): (1 + n / of, 1e3 * s / of) for span, (n, of, s) in totals.items()}
    cells = {at: f"{tokens:.2f} ({ms:.1f} ms)" for at, (tokens, ms) in found.items()}
    rows = [[f"{length:,}", *(cells.get((length, span), "") for span in spans)] for length in sizes]
    print(table(["prompt", *map(_name, spans)], rows))
    if plot is not None:
        draw(found, spans).savefig(plot, facecolor="white")


class Chains(Protocol):
    """Drafts chains after each token of a text."""

    def read(self, text: Tensor) -> None:
        """Prepare what is needed of a text (1, T) int64."""

    def start(self, window: int | None) -> None:
        """Forget what was read, and see only the last `window` tokens from now on."""

    def after(self, end: int, steps: int) -> list[int]:
        """Draft a greedy chain after token `end` of the text. `end` rises from call to call."""


class HeadChains:
    """Chains of an EAGLE-3 head, from the target's states."""

    def __init__(self, model: PreTrainedModel, head: str, sinks: int):
        self._model, self._proposer, self._sinks = model, Eagle3Proposer(head), sinks
        self._proposer.check(model)

    def read(self, text: Tensor) -> None:
        taps = self._proposer.taps(self._model)
        listener = Taps(self._model, taps.at, self._proposer.head.device)
        with torch.no_grad(), listener.listening() as taken:
            self._model(text, use_cache=False, logits_to_keep=1)
        self._text, self._states = text, listener.features(taken)

    def start(self, window: int | None) -> None:
        head = self._proposer.head
        assert isinstance(head, Eagle3Head)
        before = head.config
        head.config = replace(before, draft_window=window)
        try:
            self._runner = HeadRunner(head, BorrowedEmbeddings.by(self._model, head), self._proposer._fast)
        finally:
            head.config = before
        self._runner.start(1, keeps_all=self._sinks > 0)
        self._known = 0

    def after(self, end: int, steps: int) -> list[int]:
        known, self._known, ids = self._known, end, self._proposer.head.draft_to_target
        with patch.object(VisibleSlots, "_visible", _seeing_sinks(self._sinks)):
            logits = self._runner.extend(self._text[:, known + 1 : end + 1], self._states[:, known:end], [0])
            tokens: list[int] = []
            while True:
                token = logits[:, -1].argmax(-1, keepdim=True)
                token = token if ids is None else ids[token]
                tokens.append(int(token))
                if len(tokens) == steps:
                    break
                logits = self._runner.grow(token, None, torch.arange(steps)[None], None, chain=True)
        self._runner.drop_draft()
        return tokens


class ModelChains:
    """Chains of a draft model. With a window its cache holds the last tokens alone, at their own positions."""

    def __init__(self, model: PreTrainedModel):
        self._model = with_draft_attention(with_fast_linears(model))

    def read(self, text: Tensor) -> None:
        self._text = text

    def start(self, window: int | None) -> None:
        self._cache, self._window, self._known = DynamicCache(config=self._model.config), window, 0

    def after(self, end: int, steps: int) -> list[int]:
        logits = self._pass(self._text[:, self._known : end + 1], self._known)
        self._known = end + 1
        tokens = [int(logits.argmax())]
        while len(tokens) < steps:
            logits = self._pass(torch.tensor([tokens[-1:]]), end + len(tokens))
            tokens.append(int(logits.argmax()))
        if steps > 1:
            self._cache.crop(1 - steps)  # of a full window, as many of the first tokens are lost until more are known
        return tokens

    def _pass(self, tokens: Tensor, first: int) -> Tensor:
        """Process tokens (1, n) from position `first` on; logits (K,) after the last."""
        if self._window is not None:
            for layer in self._cache.layers:
                if layer.get_seq_length() >= self._window:
                    layer.keys, layer.values = (x[:, :, 1 - self._window :] for x in (layer.keys, layer.values))
        n, held = tokens.shape[1], self._cache.get_seq_length()
        at = torch.arange(n)[:, None] + held
        slot = torch.arange(held + n)
        visible = (slot <= at) & (slot > at - (self._window or held + n))
        return self._model(
            tokens,
            attention_mask=visible[None, None],
            position_ids=torch.arange(first, first + n)[None],
            logits_to_keep=1,
            **{CACHE: self._cache},
        ).logits[0, -1]


def draw(found: dict[tuple[int, int | None], tuple[float, float]], spans: list[int | None]) -> Any:
    """Draw tokens per round and milliseconds per chain by the prompt's length, a line per window."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.3), layout="constrained")
    panels, lengths = figure.subplots(1, 2), sorted({length for length, _ in found})
    for column, (panel, label) in enumerate(zip(panels, ("tokens per round", "ms per chain"), strict=True)):
        for span in spans:
            points = [(length, values[column]) for (length, window), values in found.items() if window == span]
            panel.plot(*zip(*points, strict=True), marker="o", label=_name(span))
        panel.set_xscale("log", base=2)
        panel.set_xticks(lengths, [f"{length:,}" for length in lengths])
        panel.set_ylim(bottom=0)
        panel.set_xlabel("tokens of the prompt")
        panel.set_ylabel(label)
    panels[0].legend(title="sees", fontsize="small")
    return figure


def _name(span: int | None) -> str:
    return "all" if span is None else f"the last {span:,}"


def _numbers(given: str) -> list[int]:
    return sorted(map(int, given.split(",")))


def _answer(model: PreTrainedModel, prompt: Tensor, new: int) -> Tensor:
    """The prompt with the target's greedy answer, (1, T) int64."""
    arguments = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    return SpeculativeGenerator(model, "ngram").generate(prompt, attention_mask=torch.ones_like(prompt), **arguments)


def _seeing_sinks(sinks: int) -> Callable[[VisibleSlots, Span], Tensor]:
    """`VisibleSlots._visible` with the first `sinks` tokens, which every token after them sees."""
    within = VisibleSlots._visible

    def visible(slots: VisibleSlots, span: Span) -> Tensor:
        held = slots.held(span)[:, None]
        return within(slots, span) | (held < sinks) & (held <= slots.positions[..., None])

    return visible if sinks else within


@torch.no_grad()
def _accepted(drafter: Chains, text: Tensor, prompt: int, window: int | None, steps: int) -> tuple[int, int, float]:
    """Accepted tokens of chains after each token of the answer, number of chains, seconds to draft them."""
    drafter.start(window)
    accepted, seconds, ends = 0, 0.0, range(prompt, text.shape[1] - steps)
    for end in ends:  # the last known token
        start = perf_counter()
        chain = drafter.after(end, steps)
        if end > ends[0]:  # the first one reads the prompt
            seconds += perf_counter() - start
        right = text[0, end + 1 : end + 1 + steps].tolist()
        accepted += next((n for n, pair in enumerate(zip(chain, right, strict=True)) if pair[0] != pair[1]), steps)
    return accepted, len(ends), seconds


if __name__ == "__main__":
    app()
