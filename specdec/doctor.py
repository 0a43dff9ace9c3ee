"""`diagnose`: what limits the speed-up of a target and a proposer on this machine, and which draft length is best.

Owns the measurement and the words. The speed-up of a chain of k tokens is simulated from what was measured: conditional
acceptance per position, seconds of a draft pass, seconds of a target pass over n tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.costs import pass_costs, target_runner
from specdec.eagle3.texts import read_prompts
from specdec.generator import SpeculativeGenerator
from specdec.proposers import HybridProposer, Proposer
from specdec.proposers.autoregressive import AutoregressiveProposer
from specdec.runner import device_of

PROBED = 8  # drafted per round, to see the acceptance at so many positions
LONGEST = 16  # simulated


@dataclass(frozen=True)
class Diagnosis:
    """What was measured, and what follows from it.

    Attributes:
        acceptance: conditional, per position. draft_pass: seconds, 0 for a proposer without a model.
        target_pass: seconds of a target pass over n tokens, by n.
        uncovered: share of the target's tokens that the draft's vocabulary lacks.
        elsewhere: acceptance at the first position on our own prompts, None if not measured.
        measured_speedup: with the automatic length, decoding only.
    """

    acceptance: tuple[float, ...]
    draft_pass: float
    target_pass: dict[int, float]
    uncovered: float
    elsewhere: float | None
    measured_speedup: float

    def speedup(self, length: int, draft_pass: float | None = None, flat: bool = False, sure: bool = False) -> float:
        """Simulated speed-up of chains of `length` tokens.

        Args:
            draft_pass: another cost of drafting. flat: verification costs what a single token does.
            sure: every drafted token is accepted.
        """
        draft = self.draft_pass if draft_pass is None else draft_pass
        gained, reached = 1.0, 1.0
        for position in range(length):
            known = self.acceptance[min(position, len(self.acceptance) - 1)] if self.acceptance else 0.0
            reached *= 1.0 if sure else known
            gained += reached
        verify = self.target_pass[1] if flat else self._pass(1 + length)
        return gained * self.target_pass[1] / (verify + length * draft)

    @property
    def best_length(self) -> int:
        return max(range(LONGEST + 1), key=self.speedup)

    def _pass(self, tokens: int) -> float:
        """Seconds of a pass over so many tokens, between the measured sizes."""
        sizes = sorted(self.target_pass)
        for low, high in pairwise(sizes):
            if tokens <= high:
                share = (tokens - low) / (high - low)
                return (1 - share) * self.target_pass[low] + share * self.target_pass[high]
        return self.target_pass[sizes[-1]] * tokens / sizes[-1]

    def in_words(self) -> str:
        """The figures, the best length, and what would help most."""
        one, best = self.target_pass[1], self.best_length
        verify = ", ".join(f"{n}: {seconds / one:.2f}" for n, seconds in self.target_pass.items())
        rates = " ".join(f"{rate:.2f}" for rate in self.acceptance) or "nothing was drafted"
        lines = [
            f"acceptance per position      {rates}",
            f"a target pass                {1e3 * one:.1f} ms; over n tokens, as multiples: {verify}",
            f"a draft pass                 {1e3 * self.draft_pass:.1f} ms, {self.draft_pass / one:.2f} of the target's",
            f"best chain                   {best} tokens: {self.speedup(best):.2f}x by these figures",
            f"measured, automatic length   {self.measured_speedup:.2f}x (decoding only)",
            "",
            *self._limits(),
        ]
        return "\n".join(lines)

    def _limits(self) -> list[str]:
        def reach(**better: Any) -> float:
            return max(self.speedup(length, **better) for length in range(LONGEST + 1))

        now = reach()
        cures = {
            "acceptance": (reach(sure=True), "better drafts (at the very best, all accepted)"),
            "drafting": (reach(draft_pass=0.0), "drafting for nothing"),
            "verification": (reach(flat=True), "verification at the price of one token"),
        }
        out = []
        if self.best_length == 0:
            out.append("Drafting does not pay here: no chain is faster than plain decoding.")
        worst = max(cures, key=lambda name: cures[name][0])
        for name, (speed, what) in sorted(cures.items(), key=lambda item: -item[1][0]):
            mark = "limits most: " if name == worst else ""
            if not mark and speed < 1.02 * now:
                continue
            out.append(f"{mark}{what} would bring {speed:.2f}x instead of {now:.2f}x.")
        if worst == "acceptance":
            out.append(
                "What accepts more: an EAGLE-3 head trained on text like yours (`specdec train`), a larger draft model "
                'or n-grams beside either ("ngram+eagle3", "ngram+draft:PATH").'
            )
        if self.draft_pass > 0.25 * self.target_pass[1]:
            out.append("The draft is slow beside its target: use a smaller one, an EAGLE-3 head, or vocab= to trim it.")
        if self.uncovered > 0.05:
            out.append(
                f"{100 * self.uncovered:.0f}% of what the target writes is not in the draft's vocabulary: each such "
                "token ends a draft. Choose a larger draft vocabulary, from text like yours."
            )
        if self.elsewhere is not None and self.acceptance and self.elsewhere > self.acceptance[0] + 0.1:
            out.append(
                f"On plain questions in English and Python the first token is accepted {self.elsewhere:.2f} of the "
                f"time, on your prompts {self.acceptance[0]:.2f}: the draft does not know this kind of text, or the "
                "prompts miss the chat template."
            )
        return out


def questions(path: Path) -> list[list[dict[str, str]]]:
    """Messages up to where the target is to answer: of a .txt one prompt a line, else as `regenerate` reads them."""
    if path.suffix == ".txt":
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        if not lines:
            raise ValueError(f"{path} is empty: one prompt per line is expected")
        return [[{"role": "user", "content": line}] for line in lines]
    found = []
    for _, messages in read_prompts(path):
        last = max(i for i, message in enumerate(messages) if message["role"] == "user")
        found.append(messages[: last + 1])
    return found


def diagnose(
    target: PreTrainedModel,
    proposer: Proposer | PreTrainedModel | str,
    prompts: Sequence[Tensor],
    *,
    usual: Sequence[Tensor] = (),
    max_new_tokens: int = 64,
    **arguments: Any,
) -> Diagnosis:
    """Measure a target and a proposer (of a `HybridProposer`, what drafts beside the n-grams) on prompts (T,) int64.

    Args:
        usual: prompts that most drafts are good at, to tell a bad draft from unusual prompts.
        arguments: more of `generate()`'s; greedy by default.
    """
    arguments = {"do_sample": False, "max_new_tokens": max_new_tokens, **arguments}
    automatic = SpeculativeGenerator(target, proposer, on_unsupported="error")
    if isinstance(automatic.proposer, HybridProposer):
        automatic = SpeculativeGenerator(target, automatic.proposer.other, on_unsupported="error")
    fixed = SpeculativeGenerator(target, automatic.proposer, draft_length=PROBED, on_unsupported="error")
    texts = [fixed.generate(prompt[None].to(device_of(target)), **arguments)[0, len(prompt) :] for prompt in prompts]
    report = fixed.report
    for prompt in prompts:
        automatic.generate(prompt[None].to(device_of(target)), **arguments)
    elsewhere = None
    if usual:
        other = SpeculativeGenerator(target, automatic.proposer, draft_length=PROBED, on_unsupported="error")
        for prompt in usual:
            other.generate(prompt[None].to(device_of(target)), **arguments)
        elsewhere = next(iter(other.report.conditional_acceptance_rate_per_pos), 0.0)
    costs = pass_costs(target_runner(target), sizes=(1, 2, 4, 8, 16))
    per_pass = report.seconds_per_draft_pass
    return Diagnosis(
        acceptance=tuple(rate for rate in report.conditional_acceptance_rate_per_pos if rate == rate),
        draft_pass=per_pass if per_pass == per_pass else 0.0,
        target_pass=costs,
        uncovered=_uncovered(automatic.proposer, torch.cat(texts)),
        elsewhere=elsewhere,
        measured_speedup=costs[1] / automatic.report.time_per_output_token,
    )


def _uncovered(proposer: Proposer, tokens: Tensor) -> float:
    known = proposer.known_tokens() if isinstance(proposer, AutoregressiveProposer) else None
    if known is None:
        return 0.0
    return float((~torch.isin(tokens.cpu(), known.cpu())).float().mean())
