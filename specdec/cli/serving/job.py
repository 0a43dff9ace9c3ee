"""`Job`: a request that was accepted, from the queue to its last event."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Event

from specdec.cli.serving.answer import Delta, Finish
from specdec.cli.serving.errors import ApiError
from specdec.cli.serving.requests import Request

SEEDS = 2**64  # torch's seeds are below


@dataclass(frozen=True)
class Done:
    """The end of a job: all choices are finished."""


@dataclass(eq=False)
class Job:
    """A request and its progress. The worker's thread runs it, the event loop's reads its events.

    Args:
        client: those who take turns.
        request: the request.
        prompts: token ids of each prompt.
        limits: most new tokens after each prompt.
        seed: seed of the first choice of each prompt; None for a random one.

    Attributes:
        position: number of choices that are finished.
        cancelled: set when nobody waits for the answer any more.
    """

    client: Hashable
    request: Request
    prompts: Sequence[list[int]]
    limits: Sequence[int]
    seed: int | None
    position: int = 0
    cancelled: Event = field(default_factory=Event)

    def __post_init__(self) -> None:
        self._first_seed = secrets.randbits(62) if self.seed is None else self.seed
        self._loop, self._events = asyncio.get_running_loop(), asyncio.Queue[Delta | Finish | Done | ApiError]()

    @property
    def num_choices(self) -> int:
        """Number of all choices: n for each prompt."""
        return len(self.prompts) * self.request.n

    @property
    def prompt(self) -> int:
        """Number of the prompt that the next choice answers."""
        return self.position // self.request.n

    @property
    def choice_seed(self) -> int:
        """Seed of the next choice: that of the request, plus its number among the choices of the prompt."""
        seed = self._first_seed + self.position % self.request.n
        return seed if seed < SEEDS else seed - SEEDS

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.prompts))

    def send(self, event: Delta | Finish | Done | ApiError) -> None:
        """Pass an event to the event loop, from any thread."""
        with suppress(RuntimeError):  # the loop has ended with its server
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def next(self) -> Delta | Finish | Done:
        """Wait for the next event.

        Raises:
            ApiError: the job failed.
        """
        event = await self._events.get()
        if isinstance(event, ApiError):
            raise event
        return event
