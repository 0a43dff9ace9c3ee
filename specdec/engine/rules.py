"""Which of the verification rules decides a call's rounds, and whether it follows the target's own choices."""

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
    """The target's own choices are followed, instead of a rule over all nodes."""
    return not sampling or rule == COUPLED or isinstance(rule, Lenient)


def verification(
    rule: RuleName | Lenient, processors: NodeProcessors, noise: Noise | None, sampling: bool, device: torch.device
) -> Verification:
    """Of a call. noise: of its sampling, where choices are followed. device: of its text."""
    if isinstance(rule, Lenient):
        return LenientVerifier(processors, noise, rule)
    if not uses_target_choices(rule, sampling):
        return RejectionVerifier(processors, _drawn(rule))
    at_once = device.type != "cpu" and processors.read_scores_alone
    return BatchedVerifier(processors, noise) if at_once else SequentialVerifier(processors, noise)


def _drawn(rule: RuleName) -> Rule:
    """At T > 0: processed scores (B, N, V) in, verdict out."""
    drawn_chain = {"block": acceptance.block_verification, "token": acceptance.speculative_sampling}

    def decide(draft: DraftTree, scores: Tensor) -> Verdict:
        probs = scores.softmax(-1)  # (B, N, V)
        if rule == "typical":
            return acceptance.typical(draft, probs)
        if draft.probs is None:
            return acceptance.point_mass(draft, probs)
        return (drawn_chain[rule] if draft.chain else acceptance.recursive_rejection)(draft, probs)

    return decide
