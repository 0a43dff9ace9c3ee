"""`bench`: how fast a target answers prompts, plainly and with each of several proposers, taking turns.

Owns what is measured and the table of it. How it is measured stands in `turns`.
"""

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
COLUMNS = ["", "tokens/s", "speed-up", "of prompts", "ms to the first", "ms a token", "tokens a pass", "plain's text"]


@dataclass(frozen=True)
class Answered:
    """What came of one way to answer.

    Attributes:
        measured: over all calls. speed_ups: over plain decoding, by prompt. same: texts that are plain decoding's.
    """

    measured: Measured
    speed_ups: tuple[float, ...]
    same: int


@dataclass(frozen=True)
class Bench:
    """What was measured: plain decoding first, then the proposers.

    Attributes:
        prompts: that all of them answered. repeats: times that they did. stopped: before all was measured.
    """

    methods: tuple[Answered, ...]
    prompts: int
    repeats: int
    stopped: bool = False

    def summary(self) -> str:
        """The ways beside each other, a line each."""
        return "\n".join(table([COLUMNS, *map(self._row, self.labels, self.methods)]))

    in_words = renamed_method("Bench.in_words", "summary")

    @property
    def labels(self) -> list[str]:
        """The ways' names, models by the last part of their paths if that is enough to tell them apart."""
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
        """Over plain decoding, by proposer and prompt: what `plots.speed_ups` draws."""
        return {label: method.speed_ups for label, method in list(zip(self.labels, self.methods, strict=True))[1:]}

    def to_dict(self) -> dict[str, Any]:
        """For JSON; seconds are of whole calls."""
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
    """Have a target answer prompts (T,) int64 plainly and with each proposer, after a call in each that is not counted.

    Interrupted (Ctrl-C), it gives what was measured until then, if every way has answered one prompt.

    Args:
        proposers: by the names to give them.
        repeats: times that each prompt is answered in each way.
        max_new_tokens: tokens to write for each prompt at most. draft_length, rule: of `SpeculativeGenerator`.
        progress: called with the calls done and those there are.
        arguments: more of `generate()`'s; greedy by default.
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

    asked = [prompt for prompt in prompts for _ in range(repeats)]
    with torch.random.fork_rng():
        for run in runs:
            run.warm_up(prompts[0])
            step()
        answered = take_turns(runs, asked, step)
    answered -= answered % repeats  # whole prompts alone
    if not answered:
        raise KeyboardInterrupt
    for run in runs:
        del run.calls[answered:]
    found = tuple(_answered(run, runs[0], repeats) for run in runs)
    return Bench(found, answered // repeats, repeats, stopped=answered < len(asked))


def _answered(run: Runs, plain: Runs, repeats: int) -> Answered:
    def pace(run: Runs, at: int) -> float:
        calls = run.calls[at : at + repeats]
        return sum(call.seconds for call in calls) / sum(len(call.text) for call in calls)

    speed_ups = tuple(pace(plain, at) / pace(run, at) for at in range(0, len(run.calls), repeats))
    same = sum(torch.equal(a.text, b.text) for a, b in zip(run.calls, plain.calls, strict=True))
    return Answered(run.measured(), speed_ups, same)
