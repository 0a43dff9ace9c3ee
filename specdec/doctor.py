"""`diagnose`: how fast a target answers prompts, plainly and in each way that a proposer offers, taking turns.

Owns the measurement. What is said of it stands in `diagnosis`, what there is to measure in `ways`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from specdec.data.conversations import read_prompts
from specdec.diagnosis import Diagnosis, Measured
from specdec.proposers import Eagle3Proposer, HybridProposer, Lookup, Proposer
from specdec.proposers.autoregressive import AutoregressiveProposer
from specdec.report import Report
from specdec.runner import device_of
from specdec.ways import Way, chain, ways

WARM_UP = 16  # tokens of the calls that are not counted


def questions(path: Path) -> Iterator[list[dict[str, str]]]:
    """Messages up to where the target is to answer, of what `regenerate` reads."""
    for _, messages in read_prompts(path):
        last = max(i for i, message in enumerate(messages) if message["role"] == "user")
        yield messages[: last + 1]


def first_questions(path: Path, limit: int) -> tuple[list[list[dict[str, str]]], int]:
    """The first `limit` of them, and how many there are; a broken line further down is said, too."""
    kept, count = [], 0
    for count, messages in enumerate(questions(path), start=1):
        if count <= limit:
            kept.append(messages)
    return kept, count


class Clock(BaseStreamer):
    """Notes when tokens came; what comes first is the prompt."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def put(self, value: Tensor) -> None:
        self.moments.append(perf_counter())

    def end(self) -> None:
        pass


class Runs:
    """The calls of one way: what they wrote and how long they took.

    Attributes:
        texts: new tokens, (T,) int64 each. seconds: of whole calls. decoding: of them, after the first token.
    """

    def __init__(self, way: Way, device: torch.device, arguments: dict[str, Any]):
        self.way, self._device, self._arguments = way, device, arguments
        self.texts: list[Tensor] = []
        self.seconds = self.decoding = 0.0

    def warm_up(self, prompt: Tensor) -> None:
        """A call that is not counted; what it taught pacing stays."""
        self.answer(prompt, max_new_tokens=WARM_UP)
        self.texts, self.seconds, self.decoding = [], 0.0, 0.0
        if self.way.spec is not None:
            self.way.spec.report.reset()

    def answer(self, prompt: Tensor, **changed: Any) -> None:
        ids, clock = prompt[None].to(self._device), Clock()
        mask = torch.ones_like(ids)  # without one, a pad token in a prompt would be taken for padding
        torch.manual_seed(0)  # the same text in every way
        start = perf_counter()
        output = self.way.generate(ids, attention_mask=mask, streamer=clock, **self._arguments | changed)
        text = output[0, len(prompt) :].cpu()  # on an accelerator, this waits for it
        self.seconds += perf_counter() - start
        self.decoding += clock.moments[-1] - clock.moments[1]
        self.texts.append(text)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.texts))

    @property
    def step(self) -> float:
        """Seconds per token after the first; of all, if there are no others."""
        later = self.tokens - len(self.texts)
        return self.decoding / later if later else self.seconds / self.tokens

    def measured(self) -> Measured:
        report = Report() if self.way.spec is None else self.way.spec.report
        first = (self.seconds - self.decoding) / len(self.texts)
        return Measured(self.way.name, self.way.code, self.tokens, self.seconds, first, report)


def diagnose(
    target: PreTrainedModel,
    proposer: Proposer | PreTrainedModel | str,
    prompts: Sequence[Tensor],
    *,
    usual: Sequence[Tensor] = (),
    max_new_tokens: int = 64,
    progress: Callable[[int, int], Any] = lambda done, total: None,
    **arguments: Any,
) -> Diagnosis:
    """Have a target answer prompts (T,) int64 in every way there is, after a call in each that is not counted.

    Args:
        usual: prompts that most drafts are good at, to tell a bad draft from unusual prompts.
        max_new_tokens: tokens to write for each prompt at most.
        progress: called with the calls done and those there are.
        arguments: more of `generate()`'s; greedy by default.
    """
    device = device_of(target)
    arguments = {"do_sample": False, "max_new_tokens": max_new_tokens, **arguments}
    runs = [Runs(way, device, arguments) for way in ways(target, proposer)]
    done, total = 0, (1 + len(prompts)) * len(runs) + len(usual)
    progress(done, total)

    def step() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    spec = runs[1].way.spec
    assert spec is not None
    whole = spec.proposer
    drafts = whole.other if isinstance(whole, HybridProposer) else whole
    with torch.random.fork_rng():
        for run in runs:
            run.warm_up(prompts[0])
            step()
        for prompt in prompts:
            for run in runs:
                run.answer(prompt)
                step()
        chains = chain(target, drafts)
        elsewhere = Runs(Way("usual prompts", "", chains.generate, chains), device, arguments)
        for prompt in usual:
            elsewhere.answer(prompt)
            step()
    plain = runs[0]
    longest = next(run.way.spec for run in reversed(runs) if run.way.name.startswith("chain"))
    assert longest is not None
    return Diagnosis(
        plain=plain.measured(),
        drafting=tuple(run.measured() for run in runs[1:]),
        step=plain.step,
        acceptance=_rates(longest.report),
        uncovered=_uncovered(drafts, torch.cat(plain.texts)),
        elsewhere=next(iter(_rates(chains.report)), 0.0) if usual else None,
        has_head=isinstance(drafts, Eagle3Proposer),
        looks_up=isinstance(whole, (HybridProposer, Lookup)),
    )


def _rates(report: Report) -> tuple[float, ...]:
    return tuple(rate for rate in report.conditional_acceptance_rate_per_pos if rate == rate)


def _uncovered(proposer: Proposer, tokens: Tensor) -> float:
    known = proposer.known_tokens() if isinstance(proposer, AutoregressiveProposer) else None
    if known is None:
        return 0.0
    return float((~torch.isin(tokens, known.cpu())).float().mean())
