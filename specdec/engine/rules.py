"""Selection of the verifier for a call, from its rule and from whether it samples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.engine.lenient import Lenient, LenientVerifier
from specdec.engine.sequential_verifier import SequentialVerifier
from specdec.engine.verifier import BatchedVerifier, RejectionVerifier, Rule, Verification
from specdec.sampling import acceptance
from specdec.sampling.draft_tree import DraftTree
from specdec.sampling.logits_processors import NodeProcessors
from specdec.sampling.noise import Noise
from specdec.sampling.results import RoundResult
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
        return RejectionVerifier(processors, REJECTION_RULES[rule])
    at_once = device.type != "cpu" and processors.read_scores_alone
    return BatchedVerifier(processors, noise) if at_once else SequentialVerifier(processors, noise)


@dataclass(frozen=True)
class RejectionRule:
    """A rule of rejection sampling at T > 0, for drafts that were drawn.

    Attributes:
        chain: the rule for chains, of a draft and probabilities (B, N, V).
        tree: the rule for trees.
        chosen: the rule for drafts that were chosen deterministically.
    """

    chain: Rule
    tree: Rule = acceptance.recursive_rejection
    chosen: Rule = acceptance.point_mass

    def __call__(self, draft: DraftTree, scores: Tensor) -> RoundResult:
        """Decide by processed scores (B, N, V)."""
        rule = self.chosen if draft.probs is None else self.chain if draft.chain else self.tree
        return rule(draft, scores.softmax(-1))


REJECTION_RULES = {  # each of `choices.RuleName` but "coupled"
    "block": RejectionRule(acceptance.block_verification),
    "token": RejectionRule(acceptance.speculative_sampling),
    "typical": RejectionRule(acceptance.typical, acceptance.typical, acceptance.typical),
}
