"""`Group`: the processes that decode one call together, each with a part of every layer (tensor parallelism).

All of them must run the target over the same draft and stop at the same token. A draft depends on clocks, on measured
costs and on rounding. Therefore rank 0 drafts and broadcasts its draft. It also broadcasts its random state, and the
result of stopping criteria that depend on more than the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria

from specdec.models.compat import tensor_parallel_mesh
from specdec.proposers.base import Proposer
from specdec.proposers.context import Context
from specdec.sampling.draft_tree import DraftTree
from specdec.sampling.noise import generator_state, set_generator_state
from specdec.sampling.results import RoundResult

BY_TEXT_ALONE = (MaxLengthCriteria, EosTokenCriteria, StopStringCriteria)  # give the same result in every process


class Group:
    """The processes that hold one model.

    Args:
        processes: a `torch.distributed` process group.

    Attributes:
        leads: True in rank 0 of the group.
    """

    def __init__(self, processes: Any):
        self._processes = processes
        self.leads = dist.get_rank(processes) == 0

    def firsts(self, value: Any) -> Any:
        """Broadcast rank 0's `value`, which must be picklable, with tensors on the CPU; other ranks' are ignored."""
        box = [value if self.leads else None]
        dist.broadcast_object_list(box, dist.get_global_rank(self._processes, 0), self._processes)
        return box[0]

    def share_random_numbers(self, device: torch.device) -> None:
        """Set the device's random generator of every process to the state of rank 0's."""
        set_generator_state(device, self.firsts(generator_state(device)))

    def drafting(self, proposer: Proposer) -> Proposer:
        """Return this process's proposer: `proposer` itself in rank 0, a receiver of its drafts elsewhere."""
        return Leading(proposer, self) if self.leads else Following(self)

    def stopping(self, criteria: StoppingCriteriaList) -> StoppingCriteriaList:
        """Wrap criteria that may differ between processes (a clock, for example), so that rank 0 decides."""
        agreed = [one if type(one) in BY_TEXT_ALONE else Agreed(one, self) for one in criteria]
        return StoppingCriteriaList(agreed)


def group_of(model: PreTrainedModel) -> Group | None:
    """Return the group of processes that hold parts of the model's layers; None if this one holds whole layers.

    Processes that shard weights but decode different prompts (FSDP) are handled by `models.lockstep` instead.
    """
    mesh = tensor_parallel_mesh(model)
    return None if mesh is None else Group(mesh.get_group())


@dataclass(frozen=True)
class Message:
    """Rank 0's broadcast in one round.

    Attributes:
        draft: fields of the draft, with tensors on the CPU.
        drafted_by: name of the proposer.
        random: state of the random generator after drafting; None at T = 0.
        error: the error that drafting raised instead; empty if none.
    """

    draft: dict[str, Any] | None = None
    drafted_by: str = ""
    random: Tensor | None = None
    error: str = ""


class Leading(Proposer):
    """Drafts with `proposer` in rank 0 and broadcasts the drafts."""

    paces_itself = True

    def __init__(self, proposer: Proposer, group: Group):
        self._proposer, self._group = proposer, group

    def begin(self, context: Context) -> None:
        with self._telling_errors():
            self._proposer.begin(context)

    def propose(self, context: Context) -> DraftTree:
        with self._telling_errors():
            draft = self._proposer.paced_draft(context)
            random = generator_state(context.tokens.device) if context.sampling else None
            message = Message(_fields(draft), self.drafted_by, random)
        self._group.firsts(message)
        return draft

    @property
    def drafted_by(self) -> str:
        return self._proposer.drafted_by

    def observe(self, draft: DraftTree, result: RoundResult, accepted: Sequence[int]) -> None:
        with self._telling_errors():
            self._proposer.observe(draft, result, accepted)

    def end(self, context: Context) -> None:
        self._proposer.end(context)

    @contextmanager
    def _telling_errors(self) -> Iterator[None]:
        """Broadcast an error, so that the other ranks do not wait for a draft forever."""
        try:
            yield
        except BaseException as error:
            self._group.firsts(Message(error=f"{type(error).__name__}: {error}"))
            raise


class Following(Proposer):
    """Receives rank 0's drafts in the other ranks."""

    paces_itself = True

    def __init__(self, group: Group):
        self._group, self._drafted_by = group, ""

    def propose(self, context: Context) -> DraftTree:
        message: Message = self._group.firsts(None)
        if message.error or message.draft is None:
            raise RuntimeError(f"drafting failed in rank 0 of the tensor-parallel group: {message.error}")
        if message.random is not None:
            set_generator_state(context.tokens.device, message.random)
        self._drafted_by = message.drafted_by
        return DraftTree(**message.draft)

    @property
    def drafted_by(self) -> str:
        return self._drafted_by


class Agreed(StoppingCriteria):
    """A stopping criterion that is evaluated in rank 0 only. Its errors are raised in all ranks."""

    def __init__(self, criterion: Any, group: Group):
        self._criterion, self._group = criterion, group
        if hasattr(criterion, "eos_token_id"):  # by which transformers pads rows that have ended
            self.eos_token_id = criterion.eos_token_id

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        own: Any = None
        if self._group.leads:
            try:
                own = torch.as_tensor(self._criterion(input_ids, scores, **kwargs)).cpu()
            except BaseException as error:
                self._group.firsts(RuntimeError(f"a stopping criterion failed in rank 0: {error!r}"))
                raise
        decided = self._group.firsts(own)
        if isinstance(decided, RuntimeError):
            raise decided
        return decided.to(input_ids.device)


def _fields(draft: DraftTree) -> dict[str, Any]:
    """Arguments of `DraftTree` for a copy of the draft on the CPU."""
    given = {field.name: getattr(draft, field.name) for field in fields(draft) if field.name != "notes"}
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in given.items()}
