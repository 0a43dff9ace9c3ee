"""`Show`: runs the demo's prompts with plain decoding and each proposer, and prints the texts and a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from examples.demo.divergence import diverge, near_ties
from specdec.cli.streamer import ColourStreamer, colour_note
from specdec.data.prompts import PROMPTS, Prompt
from specdec.engine.generator import SpeculativeGenerator
from specdec.evaluation.methods import PLAIN, Method, plain
from specdec.evaluation.timing import Call, Speed, pooled, time_call

WARM_UP_TOKENS = 24  # exact calls look for kernels at each new number of nodes
# Longer texts show more. Slow machines write shorter ones, so that the demo takes only minutes.
MAX_NEW_TOKENS, MIN_NEW_TOKENS = 128, 24
SECONDS = 300.0
ALL = "all"
# Line breaks that fit a terminal of 80 columns.
COLUMNS = (
    "prompt",
    "method",
    "same\ntokens",
    "speed-up",
    "acceptance\nrate",
    "mean\nacceptance\nlength",
    "TTFT\nms",
    "ms per\ntoken",
)


@dataclass(frozen=True)
class Run:
    """A timed call for a prompt; the method is `PLAIN` or the proposer's name."""

    method: str
    prompt: str
    call: Call

    @property
    def tokens(self) -> list[int]:
        return self.call.texts[0]


class Show:
    """Compares plain decoding of one target with several speculative generators.

    Args:
        model: the target.
        tokenizer: tokenizer of the target.
        generators: speculative generators by the proposer's name.
        console: console to print to.
        max_new_tokens: length of each text. None: 24 to 128, so that the demo takes about five minutes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        generators: dict[str, SpeculativeGenerator],
        console: Console | None = None,
        max_new_tokens: int | None = None,
    ):
        self.model, self.tokenizer = model, tokenizer
        self.methods = [plain(model), *(Method(name, spec.generate, spec) for name, spec in generators.items())]
        self.console = console or Console(highlight=False)
        self.max_new_tokens = max_new_tokens

    def run(self, prompts: Sequence[Prompt] = PROMPTS) -> list[Run]:
        """Generate and print all texts. Returns the runs, with plain decoding first for each prompt.

        Raises:
            KeyboardInterrupt: the user stopped the demo; a table of the finished runs is printed first.
        """
        texts = len(prompts) * len(self.methods)
        speed = self._warm_up(prompts[0])
        tokens = self.max_new_tokens or _fitting(SECONDS / texts, speed)
        size = f"{texts} texts of {tokens} tokens, up to {_minutes(texts * _seconds(tokens, speed))}"
        self.console.print(f"{size}. Ctrl-C stops the demo and prints the table so far.")
        if note := colour_note(self.console):
            self.console.print(note)
        runs: list[Run] = []
        try:
            for prompt in prompts:
                for method in self.methods:
                    runs.append(self._run(method, prompt, tokens))
        except KeyboardInterrupt:
            self.console.print(f"\nstopped after {len(runs)} of {texts} texts")
            if runs:
                self.console.print(summary(runs))
            raise
        for line in self._explain(prompts, runs):
            self.console.print(line, markup=False)
        self.console.print(summary(runs))
        return runs

    def _warm_up(self, prompt: Prompt) -> Speed:
        """Run each method once, since first passes allocate buffers and choose kernels.

        Returns:
            Speed of plain decoding.
        """
        inputs = prompt.encode(self.tokenizer, self.model.device)
        with self.console.status("warming up"):
            for method in self.methods:
                method.generate(**inputs, max_new_tokens=WARM_UP_TOKENS, do_sample=False)
            long_enough = {"min_new_tokens": WARM_UP_TOKENS, "max_new_tokens": WARM_UP_TOKENS}
            return Speed.of([time_call(self.methods[0], inputs, do_sample=False, **long_enough)])

    def _run(self, method: Method, prompt: Prompt, max_new_tokens: int) -> Run:
        title = "model.generate()" if method.name == PLAIN else f"specdec, {method.name}"
        self.console.rule(f"{prompt.name}: {title}", align="left")
        inputs = prompt.encode(self.tokenizer, self.model.device)
        streamer = ColourStreamer(self.tokenizer, self.console)
        call = time_call(method, inputs, streamer, max_new_tokens=max_new_tokens, do_sample=False)
        self.console.print(f"[dim]{call.num_tokens} tokens, {_ms(Speed.of([call]).time_per_token)} ms each[/dim]")
        return Run(method.name, prompt.name, call)

    def _explain(self, prompts: Sequence[Prompt], runs: Sequence[Run]) -> list[str]:
        """Say why texts are not plain decoding's: one line for all near ties, and one for each other difference."""
        ties, lines, dtype = 0, [], self.model.dtype
        for prompt in prompts:
            ids = prompt.encode(self.tokenizer, self.model.device)["input_ids"]
            first, *others = (run for run in runs if run.prompt == prompt.name)
            for run in others:
                difference = diverge(self.model, ids, first.tokens, run.tokens)
                if difference is None:
                    continue
                if difference.near_tie(dtype):
                    ties += 1
                else:
                    lines.append(f"{run.prompt}, {run.method}: {difference.explain(self.tokenizer, dtype)}")
        return [near_ties(ties, dtype), *lines] if ties else lines


def summary(runs: Sequence[Run]) -> Table:
    """Table with a line for each run, followed by each method over all prompts."""
    table = Table(
        title="Plain and speculative decoding",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption="speed-up: time per token of the whole call, prefill included\nms per token: after the first one",
    )
    for column in COLUMNS:
        justify: Literal["left", "right"] = "left" if column in ("prompt", "method") else "right"
        table.add_column(column, justify=justify)
    prompts = list(dict.fromkeys(run.prompt for run in runs))
    methods = list(dict.fromkeys(run.method for run in runs))
    for prompt in [*prompts, ALL]:
        chosen = [run for run in runs if prompt in (ALL, run.prompt)]
        for method in methods:
            ours = [run for run in chosen if run.method == method]
            done = {run.prompt for run in ours}  # some may be missing if the demo was stopped
            if ours:
                cells = _cells(ours, [run for run in chosen if run.method == PLAIN and run.prompt in done])
                style = "bold" if prompt == ALL else ""
                table.add_row(prompt if method == PLAIN else "", method, *cells, style=style)
        table.add_section()
    return table


def _cells(runs: Sequence[Run], plain: Sequence[Run]) -> list[str]:
    speed = Speed.of([run.call for run in runs])
    times = [_ms(speed.time_to_first_token), _ms(speed.time_per_output_token)]
    if runs == plain:
        return ["", "", "", "", *times]
    same = all(ours.tokens == theirs.tokens for ours, theirs in zip(runs, plain, strict=True))
    speed_up = Speed.of([run.call for run in plain]).time_per_token / speed.time_per_token
    report = pooled(run.call.report for run in runs)
    rates = [_number(report.draft_acceptance_rate), _number(report.mean_acceptance_length)]
    return ["yes" if same else "no", f"{speed_up:.2f}x", *rates, *times]


def _fitting(seconds: float, plain: Speed) -> int:
    """Number of tokens that plain decoding writes in `seconds`, a multiple of 8 within the demo's limits."""
    tokens = 1 + (seconds - plain.time_to_first_token) / plain.time_per_output_token
    return min(max(int(tokens) // 8 * 8, MIN_NEW_TOKENS), MAX_NEW_TOKENS)


def _seconds(tokens: int, plain: Speed) -> float:
    """Seconds that plain decoding takes for a text of `tokens` tokens."""
    return plain.time_to_first_token + (tokens - 1) * plain.time_per_output_token


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds > 90 else f"{seconds:.0f} seconds"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}" if seconds >= 0.01 else f"{1e3 * seconds:.2f}"


def _number(value: float) -> str:
    return f"{value:.2f}" if value == value else "-"  # NaN: nothing was drafted
