"""`bench`: measure the speed-up of several proposers over plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from specdec.engine.settings import MEASURED
from specdec.evaluation.measured import Measured, table
from specdec.evaluation.methods import plain, speculative
from specdec.evaluation.speed_up import LEVEL, MEANING, SpeedUp
from specdec.evaluation.timing import Runs, steps, take_turns, warm_up
from specdec.evaluation.verdict import Verdict, judge
from specdec.models.introspection import device_of
from specdec.proposers.base import Proposer
from specdec.utils.choices import COUPLED, RuleName
from specdec.utils.moved import renamed_method

COLUMNS = ["", "tokens/s", "speed-up", f"{LEVEL} interval", "by prompt"]
COLUMNS += ["ms to first token", "ms per token", "tokens per pass", "same text"]


@dataclass(frozen=True)
class MethodResult:
    """Results of one method.

    Attributes:
        measured: measurements over all calls.
        speed_up: speed-up over plain decoding.
        same: number of texts that equal plain decoding's.
    """

    measured: Measured
    speed_up: SpeedUp
    same: int

    @property
    def speed_ups(self) -> tuple[float, ...]:
        """Speed-up over plain decoding by prompt."""
        return self.speed_up.by_prompt


@dataclass(frozen=True)
class Bench:
    """Result of `bench`.

    Attributes:
        methods: results of plain decoding, then of each proposer.
        prompts: number of prompts that all methods answered.
        repeats: number of times that each prompt was answered.
        stopped: True if interrupted before all was measured.

    Examples:
        >>> from specdec.evaluation.measured import Measured
        >>> plain = MethodResult(Measured("plain", "model.generate()", 100, 8.0, 0.5), SpeedUp((1.0,)), same=1)
        >>> ngram = MethodResult(Measured("ngram", "...", 100, 4.0, 0.5), SpeedUp((2.0,)), same=1)
        >>> Bench((plain, ngram), prompts=1, repeats=1).speed_ups
        {'ngram': (2.0,)}
    """

    methods: tuple[MethodResult, ...]
    prompts: int
    repeats: int
    stopped: bool = False

    def summary(self) -> str:
        """Format a table with one line per method, and the verdict.

        "same text" counts texts that equal plain decoding's.
        """
        rows = table([COLUMNS, *map(self._row, self.labels, self.methods)])
        return "\n".join([*rows, f"speed-up: {MEANING}", "", *self.verdict.lines()])

    in_words = renamed_method("Bench.in_words", "summary")

    @property
    def verdict(self) -> Verdict:
        """The method to use, by the rule of `judge`, under its label."""
        plain, *drafting = [
            replace(method.measured, name=label) for label, method in zip(self.labels, self.methods, strict=True)
        ]
        return judge(plain, drafting)

    @property
    def labels(self) -> list[str]:
        """Names of the methods, with paths of models shortened to their last part if the names stay distinct."""
        whole = [method.measured.name for method in self.methods]
        parts = [name.partition(":") for name in whole]
        short = [kind + colon + Path(source).name for kind, colon, source in parts]
        return short if len({*short}) == len(short) else whole

    def _row(self, label: str, method: MethodResult) -> list[str]:
        measured, speed_up = method.measured, method.speed_up
        return [
            label,
            f"{1 / measured.pace:.1f}",
            f"{speed_up.value:.2f}x",
            "-" if method is self.methods[0] else speed_up.interval,
            f"{min(method.speed_ups):.2f} to {max(method.speed_ups):.2f}",
            f"{1e3 * measured.first:.0f}",
            f"{1e3 * measured.pace:.1f}",
            f"{measured.report.tokens_per_round:.2f}" if measured.report.num_row_rounds else "1.00",
            f"{method.same} of {self.prompts * self.repeats}",
        ]

    @property
    def speed_ups(self) -> dict[str, tuple[float, ...]]:
        """Speed-ups over plain decoding by proposer and prompt; `speed_up_of` has their intervals, too."""
        return {label: speed_up.by_prompt for label, speed_up in self.speed_up_of.items()}

    @property
    def speed_up_of(self) -> dict[str, SpeedUp]:
        """Speed-up over plain decoding by proposer, as `plots.speed_ups` draws it."""
        return {label: method.speed_up for label, method in list(zip(self.labels, self.methods, strict=True))[1:]}

    def to_dict(self) -> dict[str, Any]:
        """Return the results as JSON-serialisable values; "seconds" is the duration of all calls of a method."""
        return {
            "prompts": self.prompts,
            "repeats": self.repeats,
            "stopped": self.stopped,
            "verdict": "\n".join(self.verdict.lines()),
            "ways": [
                {
                    "name": method.measured.name,
                    "code": method.measured.code,
                    "tokens": method.measured.tokens,
                    "seconds": method.measured.seconds,
                    "seconds_to_first_token": method.measured.first,
                    "speed_up": method.speed_up.value,
                    "speed_up_interval": _interval(method.speed_up),
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
    exact: bool = False,
    progress: Callable[[int, int], Any] = lambda done, total: None,
    **arguments: Any,
) -> Bench:
    """Measure plain decoding and each proposer on some prompts, after one warm-up call each.

    If interrupted (Ctrl-C), it returns the results so far, provided that every method has answered one prompt.

    Args:
        target: the target model.
        proposers: proposers by name.
        prompts: (T,) int64 each.
        repeats: number of turns, in each of which every method answers every prompt. With several, the interval of a
            speed-up tells the noise of the machine from differences between prompts.
        max_new_tokens: maximum number of new tokens per prompt.
        draft_length: as for `SpeculativeGenerator`.
        rule: as for `SpeculativeGenerator`.
        exact: as for `SpeculativeGenerator`.
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
    methods = [plain(target)]
    for name, proposer in proposers.items():
        methods.append(speculative(name, target, proposer, draft_length, rule, code=f'"{name}"', exact=exact))
    arguments = {**MEASURED, "do_sample": False, "max_new_tokens": max_new_tokens, **arguments}
    runs = [Runs(method, device_of(target), arguments) for method in methods]
    step = steps(progress, (1 + repeats * len(prompts)) * len(runs))
    warm_up(runs, prompts[0], step)
    turns = take_turns(runs, prompts, step, repeats)
    if not turns.prompts:
        raise KeyboardInterrupt
    found = tuple(_result(run, runs[0], turns.prompts) for run in runs)
    return Bench(found, turns.prompts, turns.repeats, turns.stopped)


def _result(run: Runs, plain: Runs, prompts: int) -> MethodResult:
    measured = run.measured(prompts)
    same = sum(a.texts == b.texts for a, b in zip(run.calls, plain.calls, strict=True))
    return MethodResult(measured, measured.speed_up(plain.measured(prompts)), same)


def _interval(speed_up: SpeedUp) -> list[float] | None:
    return None if speed_up.high == inf else [speed_up.low, speed_up.high]
