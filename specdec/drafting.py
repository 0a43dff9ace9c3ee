"""`Drafting`: a proposer beside one target, and what calls have learnt of the two.

Owns what a call's pacing starts from. Knows nothing of rounds.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from specdec.graphs import Graphs
from specdec.kept_costs import KeptCosts
from specdec.learnt import Learnt
from specdec.pacing import Pacer
from specdec.proposers import Proposer


class Drafting:
    """Shared by the calls that draft so, in any thread.

    Attributes:
        learnt: by batch size, and whether the calls sample. graphs: of the target's passes, where they are captured.
    """

    def __init__(self, proposer: Proposer, target: PreTrainedModel):
        proposer.check(target)
        self.proposer, self.taps = proposer, proposer.taps(target)
        self.learnt: dict[tuple[int, bool], Learnt] = {}
        self._target = target
        self.graphs: Graphs | None = None
        self._kept: dict[int, KeptCosts] = {}  # between processes, by batch size

    def pacer(self, batch_size: int, sampling: bool, draft_length: int | None) -> Pacer:
        """A call's own; costs and acceptance carry over from call to call of one kind, costs to other processes too."""
        if batch_size not in self._kept:
            self._kept[batch_size] = KeptCosts(
                self._target, batch_size, self.proposer.drafting_model(), captured=self.graphs is not None
            )
        if (batch_size, sampling) not in self.learnt:
            learnt = Learnt(*self._kept[batch_size].read())
            self.learnt.setdefault((batch_size, sampling), learnt)  # unless another thread did
        return Pacer(draft_length, self.learnt[batch_size, sampling])

    def capture(self) -> Graphs:
        """The target's passes are captured from now on, and so are a draft model's."""
        if self.graphs is None:
            self.proposer.capture()
            self.graphs = Graphs(self._target, self.taps)
        return self.graphs

    def keep(self, batch_size: int, pacer: Pacer) -> None:
        """Leave a call's costs to other processes."""
        self._kept[batch_size].keep(pacer.learnt.verify, pacer.learnt.draft)
