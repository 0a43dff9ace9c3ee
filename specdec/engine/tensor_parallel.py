"""`Group`: the processes that decode one call together, each with a part of every layer (tensor parallelism).

All of them must run the target over the same draft and stop at the same token. What a draft looks like hangs on clocks,
on the costs known to this machine and on rounding, so one of them drafts, and the others take its draft. Likewise its
random numbers are everybody's, and so is its word where a stopping criterion goes by more than the text.

Owns what is sent from the first process to the others. Knows nothing of how drafts are made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria

from specdec.models.compat import tensor_parallel_mesh
from specdec.proposers.base import Context, Proposer
from specdec.sampling.draft_tree import DraftTree
from specdec.sampling.noise import generator_state, set_generator_state
from specdec.sampling.results import Verdict

BY_TEXT_ALONE = (MaxLengthCriteria, EosTokenCriteria, StopStringCriteria)  # every process finds the same by itself


class Group:
    """Of one model's processes.

    Attributes:
        leads: this is the process that the others follow.
    """

    def __init__(self, processes: Any):
        self._processes = processes
        self.leads = dist.get_rank(processes) == 0

    def firsts(self, value: Any) -> Any:
        """The first process's `value`, which must be picklable; the others' are not looked at. Tensors: on the CPU."""
        box = [value if self.leads else None]
        dist.broadcast_object_list(box, dist.get_global_rank(self._processes, 0), self._processes)
        return box[0]

    def share_random_numbers(self, device: torch.device) -> None:
        """Put the device's generator, in every process, where the first one's stands."""
        set_generator_state(device, self.firsts(generator_state(device)))

    def drafting(self, proposer: Proposer) -> Proposer:
        """What drafts in this process: `proposer` in the first one."""
        return Leading(proposer, self) if self.leads else Following(self)

    def stopping(self, criteria: StoppingCriteriaList) -> StoppingCriteriaList:
        """The same criteria, where a clock, say, may decide, by the first process's word."""
        agreed = [one if type(one) in BY_TEXT_ALONE else Agreed(one, self) for one in criteria]
        return StoppingCriteriaList(agreed)


def group_of(model: PreTrainedModel) -> Group | None:
    """The processes that hold parts of the model's layers; None where this one holds them whole.

    Processes that share weights but not their prompts (FSDP) are no group: see `step`.
    """
    mesh = tensor_parallel_mesh(model)
    return None if mesh is None else Group(mesh.get_group())


@dataclass(frozen=True)
class Message:
    """What the first process says in a round.

    Attributes:
        draft: its fields, on the CPU. drafted_by: the proposer's name. random: the generator's state behind the draft,
            which may have been drawn; None at T = 0.
        error: what went wrong instead.
    """

    draft: dict[str, Any] | None = None
    drafted_by: str = ""
    random: Tensor | None = None
    error: str = ""


class Leading(Proposer):
    """Drafts as `proposer` does, and tells the others."""

    def __init__(self, proposer: Proposer, group: Group):
        self._proposer, self._group = proposer, group

    def begin(self, context: Context) -> None:
        with self._telling_errors():
            self._proposer.begin(context)

    def propose(self, context: Context) -> DraftTree:
        with self._telling_errors():
            draft = self._proposer.propose(context)
            random = generator_state(context.tokens.device) if context.sampling else None
            message = Message(_fields(draft), self.drafted_by, random)
        self._group.firsts(message)
        return draft

    @property
    def drafted_by(self) -> str:
        return self._proposer.drafted_by

    def observe(self, draft: DraftTree, verdict: Verdict, accepted: Sequence[int]) -> None:
        with self._telling_errors():
            self._proposer.observe(draft, verdict, accepted)

    @contextmanager
    def _telling_errors(self) -> Iterator[None]:
        """The others would wait for a draft for ever."""
        try:
            yield
        except BaseException as error:
            self._group.firsts(Message(error=f"{type(error).__name__}: {error}"))
            raise


class Following(Proposer):
    """Takes the first process's drafts."""

    def __init__(self, group: Group):
        self._group, self._drafted_by = group, ""

    def propose(self, context: Context) -> DraftTree:
        message: Message = self._group.firsts(None)
        if message.error or message.draft is None:
            raise RuntimeError(f"the process that drafts for this one failed: {message.error}")
        if message.random is not None:
            set_generator_state(context.tokens.device, message.random)
        self._drafted_by = message.drafted_by
        return DraftTree(**message.draft)

    @property
    def drafted_by(self) -> str:
        return self._drafted_by


class Agreed(StoppingCriteria):
    """A criterion that is asked in the first process alone."""

    def __init__(self, criterion: Any, group: Group):
        self._criterion, self._group = criterion, group

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        own = self._criterion(input_ids, scores, **kwargs).cpu() if self._group.leads else None
        return self._group.firsts(own).to(input_ids.device)


def _fields(draft: DraftTree) -> dict[str, Any]:
    given = {name: getattr(draft, name) for name in ("tokens", "parents", "probs", "chain", "keys", "levels")}
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in given.items()}
