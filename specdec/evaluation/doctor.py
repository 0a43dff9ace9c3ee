"""`diagnose`: how fast a target answers prompts, plainly and in each way that a proposer offers, taking turns.

Owns what is measured. What is said of it stands in `diagnosis`, what there is to measure in `methods`, how in `turns`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.engine.report import Report
from specdec.evaluation.diagnosis import Diagnosis
from specdec.evaluation.methods import Method, chain, methods
from specdec.evaluation.timing import Runs, take_turns
from specdec.models.introspection import device_of
from specdec.proposers.base import Proposer
from specdec.proposers.draft_heads.eagle3 import Eagle3Proposer
from specdec.proposers.draft_heads.mtp import MtpProposer
from specdec.proposers.draft_models.autoregressive import AutoregressiveProposer
from specdec.proposers.hybrid import HybridProposer
from specdec.proposers.lookup.base import Lookup
from specdec.utils.choices import ProposerName


def diagnose(
    target: PreTrainedModel,
    proposer: Proposer | PreTrainedModel | ProposerName | str,
    prompts: Sequence[Tensor],
    *,
    usual: Sequence[Tensor] = (),
    max_new_tokens: int = 64,
    progress: Callable[[int, int], Any] = lambda done, total: None,
    **arguments: Any,
) -> Diagnosis:
    """Have a target answer prompts (T,) int64 in every way there is, after a call in each that is not counted.

    Interrupted (Ctrl-C), what was measured until then is the diagnosis, if every way has answered one prompt.

    Args:
        usual: prompts that most drafts are good at, to tell a bad draft from unusual prompts.
        max_new_tokens: tokens to write for each prompt at most.
        progress: called with the calls done and those there are.
        arguments: more of `generate()`'s; greedy by default.
    """
    device = device_of(target)
    arguments = {"do_sample": False, "max_new_tokens": max_new_tokens, **arguments}
    runs = [Runs(method, device, arguments) for method in methods(target, proposer)]
    done, total = 0, (1 + len(prompts)) * len(runs) + len(usual)
    progress(done, total)

    def step() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    spec = runs[1].method.spec
    assert spec is not None
    whole = spec.proposer
    drafts = whole.other if isinstance(whole, HybridProposer) else whole
    with torch.random.fork_rng():
        for run in runs:
            run.warm_up(prompts[0])
            step()
        answered = take_turns(runs, prompts, step)
        if not answered:
            raise KeyboardInterrupt
        chains = chain(target, drafts)
        elsewhere = Runs(Method("usual prompts", "", chains.generate, chains), device, arguments)
        on_usual = take_turns([elsewhere], usual, step) if answered == len(prompts) else 0
    plain = runs[0]
    longest = next(run for run in reversed(runs) if run.method.name.startswith("chain"))
    return Diagnosis(
        plain=plain.measured(),
        drafting=tuple(run.measured() for run in runs[1:]),
        step=plain.step,
        acceptance=_rates(longest.report),
        uncovered=_uncovered(drafts, torch.cat([call.text for call in plain.calls])),
        elsewhere=next(iter(_rates(elsewhere.report)), 0.0) if on_usual else None,
        has_head=isinstance(drafts, (Eagle3Proposer, MtpProposer)),
        uses_lookup=isinstance(whole, (HybridProposer, Lookup)),
        answered=answered,
        stopped=answered < len(prompts) or on_usual < len(usual),
    )


def _rates(report: Report) -> tuple[float, ...]:
    return tuple(rate for rate in report.conditional_acceptance_rate_per_pos if rate == rate)


def _uncovered(proposer: Proposer, tokens: Tensor) -> float:
    known = proposer.known_tokens() if isinstance(proposer, AutoregressiveProposer) else None
    if known is None:
        return 0.0
    return float((~torch.isin(tokens, known.cpu())).float().mean())
