"""`diagnose`: measure the methods of a proposer, to recommend one and to find what limits it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.engine.report import Report
from specdec.engine.settings import MEASURED
from specdec.evaluation.code import loading
from specdec.evaluation.diagnosis import Diagnosis
from specdec.evaluation.known_head import KnownHead
from specdec.evaluation.methods import CHAINS, methods
from specdec.evaluation.timing import Runs, Speed, steps, take_turns, warm_up
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
    repeats: int = 1,
    max_new_tokens: int = 64,
    progress: Callable[[int, int], Any] = lambda done, total: None,
    **arguments: Any,
) -> Diagnosis:
    """Measure plain decoding and each method of a proposer (see `methods`) on some prompts, as `bench` does.

    If `registry` lists another head for the target, it is measured, too, together with n-grams.

    Args:
        target: the target model.
        proposer: as for `SpeculativeGenerator`.
        prompts: (T,) int64 each.
        usual: (T,) int64 each, prompts on which most drafts do well, to tell a bad draft from unusual prompts.
        repeats: number of turns, as for `bench`. Few turns on a noisy machine are "too noisy to tell".
        max_new_tokens: maximum number of new tokens per prompt.
        progress: called with the number of calls done and the total.
        arguments: further arguments of `generate()`; greedy decoding by default.

    Returns:
        The measurements; `summary()` formats them.

    Raises:
        KeyboardInterrupt: interrupted before every method has answered one prompt.
        Unsupported: the target cannot be speculated on.

    Example:
        ```python
        prompts = [tokenizer(text, return_tensors="pt")["input_ids"][0] for text in texts]
        print(diagnose(model, "ngram", prompts).summary())
        ```
    """
    device = device_of(target)
    arguments = {**MEASURED, "do_sample": False, "max_new_tokens": max_new_tokens, **arguments}
    listed, head = methods(target, proposer), KnownHead.of(target, proposer)
    if head.method is not None:
        listed.insert(2, head.method)  # it needs no setting, so it comes before chains and trees
    runs = [Runs(method, device, arguments) for method in listed]
    step = steps(progress, (1 + repeats * len(prompts)) * len(runs) + len(usual))
    warm_up(runs, prompts[0], step)
    turns = take_turns(runs, prompts, step, repeats)
    if not turns.prompts:
        raise KeyboardInterrupt
    plain, given = runs[:2]
    longest = next(run for run in runs if run.method.name == f"chain of {CHAINS[-1]}")
    elsewhere = Runs(longest.method, device, arguments)
    on_usual = 0 if turns.stopped else take_turns([elsewhere], usual, step).prompts
    assert given.method.spec is not None
    whole = given.method.spec.proposer
    drafts = whole.other if isinstance(whole, HybridProposer) else whole
    return Diagnosis(
        plain=plain.measured(turns.prompts),
        drafting=tuple(run.measured(turns.prompts) for run in runs[1:]),
        step=Speed.of(plain.calls).time_per_output_token,
        acceptance=_rates(longest.report),
        uncovered=_uncovered(drafts, torch.tensor([token for call in plain.calls for token in call.texts[0]])),
        elsewhere=next(iter(_rates(elsewhere.report)), 0.0) if on_usual else None,
        known_head=head.note,
        loading=loading(target),
        has_head=isinstance(drafts, (Eagle3Proposer, MtpProposer)),
        uses_lookup=isinstance(whole, (HybridProposer, Lookup)),
        answered=turns.prompts,
        repeats=turns.repeats,
        stopped=turns.stopped or on_usual < len(usual),
    )


def _rates(report: Report) -> tuple[float, ...]:
    return tuple(rate for rate in report.conditional_acceptance_rate_per_pos if rate == rate)


def _uncovered(proposer: Proposer, tokens: Tensor) -> float:
    known = proposer.known_tokens() if isinstance(proposer, AutoregressiveProposer) else None
    if known is None:
        return 0.0
    return float((~torch.isin(tokens, known.cpu())).float().mean())
