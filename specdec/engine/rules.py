"""Selection of the verifier for a call, from its rule and from whether it samples."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.engine.lenient import Lenient, LenientVerifier
from specdec.engine.verifier import BatchedVerifier, RejectionVerifier, Rule, SequentialVerifier, Verification
from specdec.sampling import acceptance
from specdec.sampling.draft_tree import DraftTree
from specdec.sampling.logits_processors import NodeProcessors
from specdec.sampling.noise import Noise
from specdec.sampling.results import Verdict
from specdec.utils.choices import COUPLED, RuleName


def uses_target_choices(rule: RuleName | Lenient, sampling: bool) -> bool:
    """Return True if verification compares the draft with the target's own choices, not by rejection sampling.

    That is so for greedy decoding, for the "coupled" rule and for `Lenient`.
    """
    return not sampling or rule == COUPLED or isinstance(rule, Lenient)


def verification(
    rule: RuleName | Lenient, processors: NodeProcessors, noise: Noise | None, sampling: bool, device: torch.device
) -> Verification:
    """Build the verifier of a call.

    Args:
        rule: as for `SpeculativeGenerator`.
        processors: the call's logits processors.
        noise: exponential noise of the call's sampling; None at T = 0 and for rejection rules.
        sampling: True at T > 0.
        device: device of the call's text.
    """
    if isinstance(rule, Lenient):
        return LenientVerifier(processors, noise, rule)
    if not uses_target_choices(rule, sampling):
        return RejectionVerifier(processors, _drawn(rule))
    at_once = device.type != "cpu" and processors.read_scores_alone
    return BatchedVerifier(processors, noise) if at_once else SequentialVerifier(processors, noise)


def _drawn(rule: RuleName) -> Rule:
    """Return a rejection rule for T > 0, which maps a draft and processed scores (B, N, V) to a verdict."""
    drawn_chain = {"block": acceptance.block_verification, "token": acceptance.speculative_sampling}

    def decide(draft: DraftTree, scores: Tensor) -> Verdict:
        probs = scores.softmax(-1)  # (B, N, V)
        if rule == "typical":
            return acceptance.typical(draft, probs)
        if draft.probs is None:
            return acceptance.point_mass(draft, probs)
        return (drawn_chain[rule] if draft.chain else acceptance.recursive_rejection)(draft, probs)

    return decide
