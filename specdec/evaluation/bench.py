"""`bench`: measure the speed-up of several proposers over plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from specdec.evaluation.diagnosis import Measured, table
from specdec.evaluation.methods import plain, speculative
from specdec.evaluation.timing import Runs, Speed, steps, take_turns, warm_up
from specdec.models.introspection import device_of
from specdec.proposers.base import Proposer
from specdec.utils.choices import COUPLED, RuleName
from specdec.utils.moved import renamed_method

COLUMNS = ["", "tokens/s", "speed-up", "by prompt", "ms to first token", "ms per token", "tokens per pass", "same text"]


@dataclass(frozen=True)
class MethodResult:
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
        >>> plain = MethodResult(Measured("plain", "model.generate()", 100, 8.0, 0.5), (1.0,), same=1)
        >>> ngram = MethodResult(Measured("ngram", "...", 100, 4.0, 0.5), (2.0,), same=1)
        >>> Bench((plain, ngram), prompts=1, repeats=1).speed_ups
        {'ngram': (2.0,)}
    """

    methods: tuple[MethodResult, ...]
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

    def _row(self, label: str, method: MethodResult) -> list[str]:
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
    methods = [plain(target)]
    for name, proposer in proposers.items():
        methods.append(speculative(name, target, proposer, draft_length, rule, code=f'"{name}"'))
    arguments = {"do_sample": False, "max_new_tokens": max_new_tokens, **arguments}
    runs = [Runs(method, device_of(target), arguments) for method in methods]
    step = steps(progress, (1 + repeats * len(prompts)) * len(runs))
    warm_up(runs, prompts[0], step)
    answered = take_turns(runs, prompts, step, repeats)
    if not answered:
        raise KeyboardInterrupt
    found = tuple(_result(run, runs[0], repeats) for run in runs)
    return Bench(found, answered, repeats, stopped=answered < len(prompts))


def _result(run: Runs, plain: Runs, repeats: int) -> MethodResult:
    def pace(run: Runs, at: int) -> float:
        return Speed.of(run.calls[at : at + repeats]).time_per_token

    speed_ups = tuple(pace(plain, at) / pace(run, at) for at in range(0, len(run.calls), repeats))
    same = sum(a.texts == b.texts for a, b in zip(run.calls, plain.calls, strict=True))
    return MethodResult(run.measured(), speed_ups, same)
