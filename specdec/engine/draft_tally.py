"""`DraftTally`: counts of a proposer's drafts over calls, and the warning if next to nothing came of them."""

from __future__ import annotations

from torch import nn

from specdec.engine.report import Report
from specdec.proposers.base import Proposer
from specdec.proposers.draft_heads.feature_proposer import FeatureProposer
from specdec.proposers.hybrid import HybridProposer
from specdec.proposers.pacing.estimates import Estimates

ROUNDS = 20  # calls with fewer rounds are not counted: a draft may not pay for its own prefill in them
FEW_DRAFTS, FEW_ACCEPTED = 0.05, 0.02  # per round: pacing explores about as often when drafts do not pay
ENOUGH_DRAFTS = 10  # of batches, in which pacing rightly drafts little: rejected drafts that are worth a warning
DEAR = 0.5  # passes of the target that a draft pass takes, from which on it is called expensive


class IdleDraftWarning(UserWarning):
    """Category of the warning that next to nothing was drafted or accepted."""


class DraftTally:
    """Counts rounds and drafts of a model that drafts, and says when next to nothing came of them.

    N-grams and other lookups are not counted, alone or in a hybrid. That they find nothing is ordinary.
    """

    def __init__(self) -> None:
        self.rounds = self.drafts = self.accepted = 0
        self._batches = self._is_head = False
        self._beside = ""  # the lookup's name in a hybrid

    def add(self, report: Report, proposer: Proposer) -> None:
        """Count a call."""
        model = proposer.other if isinstance(proposer, HybridProposer) else proposer
        if report.num_rounds < ROUNDS or model.drafting_model() is None:
            return
        name = model.drafted_by
        by_lookup = sum(drafts for by, drafts in report.num_drafts_by.items() if by != name)
        self.rounds += report.num_row_rounds - by_lookup
        self.drafts += report.num_drafts_by.get(name, 0)
        self.accepted += report.num_accepted_tokens_by.get(name, 0)
        self._batches |= report.num_rows > 1
        self._is_head = isinstance(model, FeatureProposer)
        self._beside = type(proposer.ngram).__name__ if isinstance(proposer, HybridProposer) else ""

    @property
    def _few(self) -> bool:
        return self.drafts <= FEW_DRAFTS * self.rounds

    @property
    def _useless(self) -> bool:
        return self.accepted <= FEW_ACCEPTED * self.rounds

    def idle(self, draft_length: int | None) -> bool:
        """Return whether next to nothing was drafted or accepted, against the user's wish.

        draft_length: as for `SpeculativeGenerator`. 0 drafts nothing on purpose.
        """
        if draft_length == 0 or self.rounds < ROUNDS:
            return False
        if self._batches:
            return self._useless and self.drafts >= ENOUGH_DRAFTS
        return self._few or self._useless

    def warning(self, estimates: Estimates, size: float) -> str:
        """Say that next to nothing was drafted or accepted, why, and what would help.

        Args:
            estimates: the costs that the calls measured.
            size: weights of the draft, as a multiple of the target's.
        """
        return f"{self._finding()}. {self._reason(estimates, size)}. {self._help()}"

    def _finding(self) -> str:
        rounds, compared_with = f"{self.rounds} rounds", "plain decoding"
        if self._beside:
            rounds, compared_with = f"{rounds} without a draft of {self._beside}", f"{self._beside} alone"
        if not self.drafts:
            return f"nothing was drafted in {rounds}, so nothing is gained over {compared_with}"
        drafts = f"{self.drafts} draft{'s' * (self.drafts > 1)} in {rounds}"
        accepted = f"{self.accepted} accepted tokens" if self.accepted else "no accepted token"
        return f"{drafts} with {accepted}: next to nothing is gained over {compared_with}"

    def _help(self) -> str:
        """Name what may help and is not in use."""
        if self._is_head:
            options = ["to train the head on such texts (`specdec train --from HEAD`)", "another draft"]
        else:
            options = ["a smaller draft of the target's own family", "a head trained for the target"]
        if not self._beside:
            options.append('n-grams ("ngram")')
        return (
            f"What may help: {', or '.join(options)}. "
            "`specdec doctor` measures what pays. draft_length=0 decodes plainly without this warning"
        )

    def _reason(self, estimates: Estimates, size: float) -> str:
        share = estimates.draft_step
        if self._few and estimates.draft.known and share >= DEAR:
            return f"A pass of the draft takes {share:.2f} times as long as one of the target, so drafting cannot pay"
        if self._few and size >= DEAR:
            return f"The draft has {size:.2f} times as many weights as the target, so its passes cost too much to pay"
        if not self.drafts and not estimates.draft.known:
            return "To read the prompt with the draft is expected to cost more than drafts save in so short an answer"
        if not self.drafts:
            cost = f"a pass of the draft takes {share:.2f} times as long as one of the target"
            return f"Drafting is not expected to pay by the costs measured on this machine: {cost}"
        if not self.accepted:
            return "The draft never agrees with the target: it may belong to another model, tokenizer or chat template"
        return "The draft hardly ever pays, by what was accepted and what it costs"


def relative_size(proposer: Proposer, target: nn.Module) -> float:
    """Return the number of a draft's weights, as a multiple of the target's; 0 if no model drafts."""
    model = proposer.drafting_model()
    return 0.0 if model is None else _weights(model) / max(1, _weights(target))


def _weights(model: nn.Module) -> int:
    return sum(tensor.numel() for tensors in (model.parameters(), model.buffers()) for tensor in tensors)
