"""`diagnose`: measure plain decoding and the methods of a proposer on some prompts, in turns.

The methods are defined in `methods`, measured by `timing`, and summarised in `diagnosis`.
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
    """Measure plain decoding and each method of a proposer on some prompts, after one warm-up call each.

    If interrupted (Ctrl-C), it returns the results so far, provided that every method has answered one prompt.

    Args:
        target: the target model.
        proposer: as for `SpeculativeGenerator`.
        prompts: (T,) int64 each.
        usual: (T,) int64 each, prompts on which most drafts do well, to tell a bad draft from unusual prompts.
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
