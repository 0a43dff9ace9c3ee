"""`DraftSession`: a proposer for one target, with estimates that calls share; `DraftSessions`: those of a generator."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any, NamedTuple

from torch import nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from specdec.engine.draft_memory import DraftMemory
from specdec.engine.draft_tally import DraftTally
from specdec.engine.lenient import Lenient
from specdec.models.cuda_graphs import KnownFunctions
from specdec.models.graph_pool import GraphPool
from specdec.models.introspection import unwrap_model
from specdec.models.static_forward import StaticForward
from specdec.proposers.base import Proposer
from specdec.proposers.draft_models.draft_model import DraftModelProposer
from specdec.proposers.factory import as_proposer
from specdec.proposers.hybrid import within_grammar
from specdec.proposers.lookup.ngram import NgramProposer
from specdec.proposers.pacing.cost_store import CostStore
from specdec.proposers.pacing.estimates import Estimates
from specdec.proposers.pacing.pacer import Pacer
from specdec.utils.choices import COUPLED, RuleName
from specdec.utils.recent import Recent

MOST_ASSISTANTS = 16  # prepared for later calls; a model made for each call would add one each time


class CallKind(NamedTuple):
    """Kind of a call. Calls of one kind share estimates.

    Attributes:
        batch_size: number of rows.
        sampling: False for greedy decoding.
        exact: True if draft nodes are computed bit for bit as in plain decoding.
        rule: verification rule.
        grammar: True if a grammar restricts the text.
        row_kernels: True within `SpeculativeGenerator.exact`, where passes have other costs.
    """

    batch_size: int
    sampling: bool
    exact: bool = False
    rule: RuleName | Lenient = COUPLED
    grammar: bool = False
    row_kernels: bool = False


class DraftSession:
    """A proposer prepared for one target, shared by all calls that use it, in any thread.

    Args:
        proposer: checked against the target.
        target: the target model.

    Attributes:
        taps: hidden states of the target that the proposer reads.
        estimates: acceptance and cost estimates by kind of call.
        static_forward: captured target passes; None until `capture`.
        tally: counts of its drafts.
        graphs: CUDA graphs with their buffers that no call uses, for later calls.
        memory: what it has read of texts whose caches callers keep.
        recorded: what its calls have learned about their functions, see `Recorder`.
    """

    def __init__(self, proposer: Proposer, target: PreTrainedModel):
        proposer.check(target)
        self.proposer, self.taps = proposer, proposer.taps(target)
        self.estimates: dict[CallKind, Estimates] = {}
        self.tally, self.memory = DraftTally(), DraftMemory()
        self._target = target
        self.static_forward: StaticForward | None = None
        self.recorded, self.graphs = KnownFunctions(), GraphPool()
        self._within_grammar: Proposer | None = None
        self._kept: dict[tuple[int, bool, bool], CostStore] = {}  # by what costs depend on; shared with other processes

    def pacer(self, kind: CallKind, draft_length: int | None) -> Pacer:
        """Make the pacer of a call. Calls of one kind share estimates, and begin with the cost store's."""
        if kind not in self.estimates:
            self.estimates.setdefault(kind, Estimates(*self._store(kind).read()))  # unless another thread did
        return Pacer(draft_length, self.estimates[kind])

    def proposer_of(self, kind: CallKind) -> Proposer:
        """Return a call's own copy of the proposer, with a source of forced tokens next to it if there is a grammar."""
        if not kind.grammar:
            return copy(self.proposer)
        if self._within_grammar is None:
            self._within_grammar = within_grammar(self.proposer)
        return copy(self._within_grammar)

    def capture(self, compiled: bool) -> StaticForward:
        """Capture passes of the target and of a draft model from now on; `compiled` as for `StaticForward`."""
        if self.static_forward is None or self.static_forward.compiled != compiled:
            self.proposer.capture(compiled)
            self.static_forward = StaticForward(self._target, self.taps, compiled)
            self.recorded = KnownFunctions()
            self.graphs.clear()
        return self.static_forward

    def keep(self, kind: CallKind, pacer: Pacer) -> None:
        """Save the costs that a call measured in the cost store."""
        self._store(kind).keep(pacer.estimates.verify, pacer.estimates.draft)

    def _store(self, kind: CallKind) -> CostStore:
        key = kind.batch_size, kind.exact, kind.row_kernels
        if key not in self._kept:
            captured = self.static_forward is not None and not kind.exact
            drafting = self.proposer.drafting_model()
            self._kept[key] = CostStore(self._target, kind.batch_size, drafting, captured, kind.exact, kind.row_kernels)
        return self._kept[key]


class DraftSessions:
    """The `DraftSession` of a generator's proposer, and those of assistants that its calls request.

    Each is prepared once, and again after one of its models changed device, dtype or vocabulary.

    Args:
        proposer: the generator's proposer.
        target: the target model.

    Attributes:
        assistants: by requested assistant, the state of the models when it was prepared, and its drafting; None there
            if it could not draft for this target. Those that were used last.
    """

    def __init__(self, proposer: Proposer, target: PreTrainedModel):
        self._target = target
        self.assistants: Recent[tuple[Any, DraftSession | None]] = Recent(MOST_ASSISTANTS)
        self._prepare(proposer)

    def _prepare(self, proposer: Proposer) -> None:
        self._own = DraftSession(proposer, self._target)
        self._state = self._state_with(proposer.drafting_model())

    def release_memory(self) -> None:
        """Free the CUDA graphs and buffers that are kept for later calls."""
        others = [drafting for _, drafting in self.assistants if drafting is not None]
        for drafting in (self._own, *others):
            drafting.graphs.clear()
            drafting.recorded.checked.clear()  # keeps the models' earlier hooks and modules alive

    @property
    def own(self) -> DraftSession:
        """The drafting of the generator's proposer."""
        proposer = self._own.proposer
        if self._state != self._state_with(proposer.drafting_model()):
            self._own.graphs.clear()
            self._prepare(proposer)
        return self._own

    def for_call(
        self, config: GenerationConfig, assistant: Any, tokenizers: tuple[Any, Any], warn: Callable[[str], None]
    ) -> DraftSession:
        """Return the drafting that a call requests, else the generator's own.

        Precedence as in transformers 5.23: prompt lookup, early exit, assistant model.

        Args:
            config: the call's generation config.
            assistant: a draft model, or None.
            tokenizers: the tokenizers of target and assistant, None where the call has none.
            warn: called with a message if the requested assistant cannot draft for this target.

        Raises:
            ValueError: `prompt_lookup_num_tokens` below 1.
        """
        requested: Any = f"exit:{config.assistant_early_exit}" if config.assistant_early_exit is not None else None
        lookup = config.prompt_lookup_num_tokens
        if lookup is not None:
            if lookup < 1:
                raise ValueError(f"prompt_lookup_num_tokens must be at least 1, got {lookup!r}: None turns it off")
            requested = "ngram"
        elif requested is None and assistant is not None:
            requested = unwrap_model(assistant)
        own = self.own
        if requested is None or _drafts_with(own.proposer, requested):
            return own
        state = tokenizers, self._state_with(None if isinstance(requested, str) else requested)

        def prepared() -> tuple[Any, DraftSession | None]:
            try:
                return state, DraftSession(as_proposer(requested, self._target, tokenizers), self._target)
            except ValueError as error:
                field = "assistant_early_exit" if isinstance(requested, str) else "assistant_model"
                warn(f"{field} is ignored, and {type(own.proposer).__name__} drafts instead: {error}")
                return state, None

        _, drafting = self.assistants.get(requested, prepared, lambda kept: kept[0] == state)
        return drafting or own

    def _state_with(self, drafting: nn.Module | None) -> tuple[Any, ...]:
        """State of the target and of a draft model or head, on which a proposer's checks depend."""
        return _state(self._target), drafting and _state(drafting)


def _state(model: nn.Module) -> tuple[Any, ...]:
    """Device and dtype of a model's weights, and its vocabulary size."""
    weight, config = next(model.parameters(), None), getattr(model, "config", None)
    text = config.get_text_config(decoder=True) if isinstance(config, PretrainedConfig) else config
    return weight is not None and (weight.device, weight.dtype), getattr(text, "vocab_size", None)


def _drafts_with(proposer: Proposer, requested: Any) -> bool:
    """Return True if the proposer is the one that a call requests: "ngram" or a draft model."""
    if requested == "ngram":
        return isinstance(proposer, NgramProposer)
    return isinstance(proposer, DraftModelProposer) and proposer.model is requested
