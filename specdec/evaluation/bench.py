"""`bench`: measure plain decoding and several proposers on some prompts, in turns (see `timing`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.engine.generator import SpeculativeGenerator
from specdec.evaluation.diagnosis import Measured, table
from specdec.evaluation.methods import Method
from specdec.evaluation.timing import Runs, take_turns
from specdec.models.introspection import device_of
from specdec.proposers.base import Proposer
from specdec.utils.choices import COUPLED, RuleName
from specdec.utils.moved import renamed_method

PLAIN = "plain"
COLUMNS = ["", "tokens/s", "speed-up", "by prompt", "ms to first token", "ms per token", "tokens per pass", "same text"]


@dataclass(frozen=True)
class Answered:
    """Results of one method.

    Attributes:
        measured: measurements over all calls.
        speed_ups: speed-up over plain decoding by prompt.
        same: number of texts that equal plain decoding's.
    """

    measured: Measured
    speed_ups: tuple[float, ...]
    same: int


@dataclass(frozen=True)
class Bench:
    """Result of `bench`.

    Attributes:
        methods: results of plain decoding, then of each proposer.
        prompts: number of prompts that all methods answered.
        repeats: number of times that each prompt was answered.
        stopped: True if interrupted before all was measured.

    Examples:
        >>> from specdec.evaluation.diagnosis import Measured
        >>> plain = Answered(Measured("plain", "model.generate()", 100, 8.0, 0.5), (1.0,), same=1)
        >>> ngram = Answered(Measured("ngram", "...", 100, 4.0, 0.5), (2.0,), same=1)
        >>> Bench((plain, ngram), prompts=1, repeats=1).speed_ups
        {'ngram': (2.0,)}
    """

    methods: tuple[Answered, ...]
    prompts: int
    repeats: int
    stopped: bool = False

    def summary(self) -> str:
        """Format a table with one line per method; "same text" counts texts that equal plain decoding's."""
        return "\n".join(table([COLUMNS, *map(self._row, self.labels, self.methods)]))

    in_words = renamed_method("Bench.in_words", "summary")

    @property
    def labels(self) -> list[str]:
        """Names of the methods, with paths of models shortened to their last part if the names stay distinct."""
        whole = [method.measured.name for method in self.methods]
        parts = [name.partition(":") for name in whole]
        short = [kind + colon + Path(source).name for kind, colon, source in parts]
        return short if len({*short}) == len(short) else whole

    def _row(self, label: str, method: Answered) -> list[str]:
        measured, plain = method.measured, self.methods[0].measured
        return [
            label,
            f"{1 / measured.pace:.1f}",
            f"{plain.pace / measured.pace:.2f}x",
            f"{min(method.speed_ups):.2f} to {max(method.speed_ups):.2f}",
            f"{1e3 * measured.first:.0f}",
            f"{1e3 * measured.pace:.1f}",
            f"{measured.report.tokens_per_round:.2f}" if measured.report.num_row_rounds else "1.00",
            f"{method.same} of {self.prompts * self.repeats}",
        ]

    @property
    def speed_ups(self) -> dict[str, tuple[float, ...]]:
        """Speed-ups over plain decoding by proposer and prompt, as `plots.speed_ups` draws them."""
        return {label: method.speed_ups for label, method in list(zip(self.labels, self.methods, strict=True))[1:]}

    def to_dict(self) -> dict[str, Any]:
        """Return the results as JSON-serialisable values; "seconds" is the duration of all calls of a method."""
        plain = self.methods[0].measured
        return {
            "prompts": self.prompts,
            "repeats": self.repeats,
            "stopped": self.stopped,
            "ways": [
                {
                    "name": method.measured.name,
                    "code": method.measured.code,
                    "tokens": method.measured.tokens,
                    "seconds": method.measured.seconds,
                    "seconds_to_first_token": method.measured.first,
                    "speed_up": plain.pace / method.measured.pace,
                    "speed_up_by_prompt": list(method.speed_ups),
                    "same_texts": method.same,
                    "report": method.measured.report.to_dict() if method.measured.report.num_calls else None,
                }
                for method in self.methods
            ],
        }


def bench(
    target: PreTrainedModel,
    proposers: Mapping[str, Proposer],
    prompts: Sequence[Tensor],
    *,
    repeats: int = 1,
    max_new_tokens: int = 128,
    draft_length: int | None = None,
    rule: RuleName = COUPLED,
    progress: Callable[[int, int], Any] = lambda done, total: None,
    **arguments: Any,
) -> Bench:
    """Measure plain decoding and each proposer on some prompts, after one warm-up call each.

    If interrupted (Ctrl-C), it returns the results so far, provided that every method has answered one prompt.

    Args:
        target: the target model.
        proposers: proposers by name.
        prompts: (T,) int64 each.
        repeats: number of times that each method answers each prompt.
        max_new_tokens: maximum number of new tokens per prompt.
        draft_length: as for `SpeculativeGenerator`.
        rule: as for `SpeculativeGenerator`.
        progress: called with the number of calls done and the total.
        arguments: further arguments of `generate()`; greedy decoding by default.

    Returns:
        The results; `summary()` formats them.

    Raises:
        KeyboardInterrupt: interrupted before every method has answered one prompt.
        Unsupported: the target cannot be speculated on.

    Example:
        ```python
        prompts = [tokenizer(text, return_tensors="pt")["input_ids"][0] for text in texts]
        print(bench(model, {"ngram": NgramProposer()}, prompts).summary())
        ```
    """
    device = device_of(target)
    arguments = {"do_sample": False, "max_new_tokens": max_new_tokens, **arguments}
    methods = [Method(PLAIN, "model.generate()", target.generate)]
    for name, proposer in proposers.items():
        spec = SpeculativeGenerator(target, proposer, draft_length=draft_length, rule=rule, on_unsupported="error")
        methods.append(Method(name, f'SpeculativeGenerator(model, "{name}")', spec.generate, spec))
    runs = [Runs(method, device, arguments) for method in methods]
    done, total = 0, (1 + repeats * len(prompts)) * len(runs)
    progress(done, total)

    def step() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    all_prompts = [prompt for prompt in prompts for _ in range(repeats)]
    with torch.random.fork_rng():
        for run in runs:
            run.warm_up(prompts[0])
            step()
        answered = take_turns(runs, all_prompts, step)
    answered -= answered % repeats  # complete prompts only
    if not answered:
        raise KeyboardInterrupt
    for run in runs:
        del run.calls[answered:]
    found = tuple(_answered(run, runs[0], repeats) for run in runs)
    return Bench(found, answered // repeats, repeats, stopped=answered < len(all_prompts))


def _answered(run: Runs, plain: Runs, repeats: int) -> Answered:
    def pace(run: Runs, at: int) -> float:
        calls = run.calls[at : at + repeats]
        return sum(call.seconds for call in calls) / sum(len(call.text) for call in calls)

    speed_ups = tuple(pace(plain, at) / pace(run, at) for at in range(0, len(run.calls), repeats))
    same = sum(torch.equal(a.text, b.text) for a, b in zip(run.calls, plain.calls, strict=True))
    return Answered(run.measured(), speed_ups, same)
