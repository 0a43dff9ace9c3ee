"""`DraftTally`: counts of a proposer's drafts over calls, and the warning if next to nothing came of them."""

from __future__ import annotations

from specdec.engine.report import Report
from specdec.proposers.base import Proposer
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
        self._batches = False

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

    def warning(self, draft_length: int | None, estimates: Estimates) -> str:
        """Say that next to nothing was drafted or accepted, why, and what would help; "" if there is nothing to say.

        Args:
            draft_length: as for `SpeculativeGenerator`. 0 drafts nothing on purpose.
            estimates: the costs that the calls measured.
        """
        if draft_length == 0 or self.rounds < ROUNDS:
            return ""
        few = self.drafts <= FEW_DRAFTS * self.rounds
        useless = self.accepted <= FEW_ACCEPTED * self.rounds
        if (not useless and not few) or (self._batches and not (useless and self.drafts >= ENOUGH_DRAFTS)):
            return ""
        return f"{self._finding(few, useless)}. {self._reason(few, estimates)}. {HELP}"

    def _finding(self, few: bool, useless: bool) -> str:
        if not self.drafts:
            return f"nothing was drafted in {self.rounds} rounds, so nothing is gained over plain decoding"
        drafts = f"{self.drafts} draft{'s' * (self.drafts > 1)} in {self.rounds} rounds"
        accepted = f"{self.accepted} accepted tokens" if self.accepted else "no accepted token"
        return f"{drafts} with {accepted}: next to nothing is gained over plain decoding"

    def _reason(self, few: bool, estimates: Estimates) -> str:
        plain = estimates.verify.plain
        share = estimates.draft_step / plain if plain else 0.0
        if few and share >= DEAR:
            return f"A pass of the draft takes {share:.2f} times as long as one of the target, so drafting cannot pay"
        if not self.drafts:
            return "By the costs that were measured on this machine drafting is not expected to pay"
        if not self.accepted:
            return "The draft never agrees with the target: it may belong to another model, tokenizer or chat template"
        return "The draft hardly ever pays, by what was accepted and what it costs"


HELP = (
    "What may help: a smaller draft of the target's own family, a head trained for the target, or n-grams "
    '("ngram"); `specdec doctor` measures what pays. draft_length=0 decodes plainly without this warning'
)
