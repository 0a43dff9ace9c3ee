"""`Drafting`: a proposer beside one target, and what calls have learnt of the two; `Draftings`: those of a generator.

Owns what a call's pacing starts from. Knows nothing of rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from specdec.models.cuda_graphs import Known
from specdec.models.introspection import unwrap_model
from specdec.models.static_forward import StaticForward
from specdec.proposers.base import Proposer
from specdec.proposers.draft_models.draft_model import DraftModelProposer
from specdec.proposers.factory import as_proposer
from specdec.proposers.lookup.ngram import NgramProposer
from specdec.proposers.pacing.cost_store import CostStore
from specdec.proposers.pacing.estimates import Estimates
from specdec.proposers.pacing.pacer import Pacer


class Drafting:
    """Shared by the calls that draft so, in any thread.

    Attributes:
        estimates: by batch size, and whether the calls sample. static_forward: of the target's passes, where they are captured.
        recorded: see `Recorder`.
    """

    def __init__(self, proposer: Proposer, target: PreTrainedModel):
        proposer.check(target)
        self.proposer, self.taps = proposer, proposer.taps(target)
        self.estimates: dict[tuple[int, bool], Estimates] = {}
        self._target = target
        self.static_forward: StaticForward | None = None
        self.recorded: Known = {}
        self._kept: dict[int, CostStore] = {}  # between processes, by batch size

    def pacer(self, batch_size: int, sampling: bool, draft_length: int | None) -> Pacer:
        """A call's own; costs and acceptance carry over from call to call of one kind, costs to other processes too."""
        if batch_size not in self._kept:
            self._kept[batch_size] = CostStore(
                self._target, batch_size, self.proposer.drafting_model(), captured=self.static_forward is not None
            )
        if (batch_size, sampling) not in self.estimates:
            estimates = Estimates(*self._kept[batch_size].read())
            self.estimates.setdefault((batch_size, sampling), estimates)  # unless another thread did
        return Pacer(draft_length, self.estimates[batch_size, sampling])

    def capture(self, compiled: bool) -> StaticForward:
        """The target's passes are captured from now on, and so are a draft model's; compiled: see `StaticForward`."""
        if self.static_forward is None or self.static_forward.compiled != compiled:
            self.proposer.capture(compiled)
            self.static_forward = StaticForward(self._target, self.taps, compiled)
            self.recorded = {}
        return self.static_forward

    def keep(self, batch_size: int, pacer: Pacer) -> None:
        """Leave a call's costs to other processes."""
        self._kept[batch_size].keep(pacer.estimates.verify, pacer.estimates.draft)


class Draftings:
    """A generator's own, and those that its calls ask for, which are prepared once, and anew where a model was moved,
    converted or given another vocabulary since."""

    def __init__(self, proposer: Proposer, target: PreTrainedModel):
        self._target = target
        self.asked_for: dict[Any, tuple[Any, Drafting | None]] = {}  # None: it cannot draft as it was then
        self._prepare(proposer)

    def _prepare(self, proposer: Proposer) -> None:
        self._own = Drafting(proposer, self._target)
        self._state = self._state_with(proposer.drafting_model())

    @property
    def own(self) -> Drafting:
        proposer = self._own.proposer
        if self._state != self._state_with(proposer.drafting_model()):
            self._prepare(proposer)
        return self._own

    def of_call(
        self, config: GenerationConfig, assistant: Any, tokenizers: tuple[Any, Any], warn: Callable[[str], None]
    ) -> Drafting:
        """The generator's, unless the call asks for another, in the order in which transformers looks (5.23).

        Args:
            assistant: a draft model. tokenizers: the target's and the assistant's, where the call has them. warn: is
                told what cannot draft for this target.
        """
        asked: Any = f"exit:{config.assistant_early_exit}" if config.assistant_early_exit is not None else None
        lookup = config.prompt_lookup_num_tokens
        if lookup is not None:
            if lookup < 1:
                raise ValueError(f"prompt_lookup_num_tokens must be at least 1, got {lookup!r}: None switches it off")
            asked = "ngram"
        elif asked is None and assistant is not None:
            asked = unwrap_model(assistant)
        own = self.own
        if asked is None or _drafts_with(own.proposer, asked):
            return own
        state = tokenizers, self._state_with(None if isinstance(asked, str) else asked)
        before, drafting = self.asked_for.get(asked, (None, None))
        if before != state:
            try:
                drafting = Drafting(as_proposer(asked, self._target, tokenizers), self._target)
            except ValueError as error:
                drafting, field = None, "assistant_early_exit" if isinstance(asked, str) else "assistant_model"
                warn(f"{field} is ignored, {type(own.proposer).__name__} drafts: {error}")
            self.asked_for[asked] = state, drafting
        return drafting or own

    def _state_with(self, drafting: nn.Module | None) -> tuple[Any, ...]:
        """What proposers check, of the target and of what drafts for it."""
        return _state(self._target), drafting and _state(drafting)


def _state(model: nn.Module) -> tuple[Any, ...]:
    """Where a model's weights are, their type, and how many tokens it knows."""
    weight, config = next(model.parameters(), None), getattr(model, "config", None)
    text = config.get_text_config(decoder=True) if isinstance(config, PretrainedConfig) else config
    return weight is not None and (weight.device, weight.dtype), getattr(text, "vocab_size", None)


def _drafts_with(proposer: Proposer, asked: Any) -> bool:
    """It is what a call asks for: n-grams, or a draft model."""
    if asked == "ngram":
        return isinstance(proposer, NgramProposer)
    return isinstance(proposer, DraftModelProposer) and proposer.model is asked
