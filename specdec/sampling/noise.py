"""`Noise`: the random numbers of a call's sampling, one per output column, row and token, as plain decoding draws them.

Plain `generate()` samples with `torch.multinomial(p, 1)`, which is `argmax(p / E)` with fresh exponential noise E
(torch 2.13, aten/native/Distributions.cpp): a race that token x wins with probability p(x). Here E belongs to the
column instead of the pass: whatever was drafted, the token at a column is the winner of that column's race. So the text
is a function of the seed alone, and it is plain decoding's. The law is the target's, since p never depends on the E of
a column that is still to come; a draft may look at E and bet on the winner (Gumbel coupling, arXiv 2408.07978).

Owns the generator's state. Knows nothing of models.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from specdec.utils.device_copies import uploaded

KEPT_BYTES = 256 * 2**20  # of columns kept as tensors; others are drawn anew from the state they were drawn at
_active: list[tuple[str, int]] = []  # (device, thread) of the calls that sample now
_lock = threading.Lock()


class Noise:
    """Exponential noise for B rows of V tokens, by output column (the first new token's is 0).

    Args:
        batch_size: B. vocab_size: V. device: of the scores it is for; its default generator says where noise starts.
    """

    def __init__(self, batch_size: int, vocab_size: int, device: torch.device):
        self.shape, self.device = (batch_size, vocab_size), device
        self.settled = 0  # columns that are part of the text for good
        self._generator = torch.Generator(device)
        self._states = {0: generator_state(device)}  # by column: before its noise is drawn
        self._drawn: dict[int, Tensor] = {}  # by column, the one used last at the end
        self._most = max(1, KEPT_BYTES // (4 * batch_size * vocab_size))

    def column(self, index: int) -> Tensor:
        """(B, V) float32, the noise of one column that is not settled."""
        for missing in range(max(self._states), index):
            self._draw(missing)
        if index not in self._drawn:
            self._draw(index)
        kept = self._drawn[index] = self._drawn.pop(index)
        return kept

    def at(self, columns: Sequence[int]) -> Tensor:
        """(B, V) float32, for each row its own column's."""
        columns = [max(column, self.settled) for column in columns]  # a finished row's is as good as any
        if len(set(columns)) == 1:
            return self.column(columns[0])
        return torch.stack([self.column(column)[b] for b, column in enumerate(columns)])

    def ahead(self, columns: Sequence[int], count: int) -> Tensor:
        """(B, count, V) float32, for each row its own column's and those of the columns behind it."""
        asked = [[max(column + more, self.settled) for more in range(count)] for column in columns]
        every = sorted({column for row in asked for column in row})
        if asked.count(asked[0]) == len(asked) or len(every) > 2 * count:  # rows so far apart would take much memory
            drawn = [self.at(at_depth) for at_depth in zip(*asked, strict=True)]
            return torch.stack(drawn, 1) if count > 1 else drawn[0][:, None]
        place = uploaded([[every.index(column) for column in row] for row in asked], self.device)  # (B, count)
        rows = torch.arange(len(asked), device=self.device)[:, None]
        return torch.stack([self.column(column) for column in every])[place, rows]

    def settle(self, columns: int) -> None:
        """The first `columns` are part of the text: nobody asks for them again."""
        if columns > self.settled:
            self.column(columns - 1)
        self.settled = columns
        for kept in (self._states, self._drawn):
            for column in [column for column in kept if column < columns]:
                del kept[column]

    def leave_behind(self) -> None:
        """Put the device's generator where plain decoding leaves it after the settled columns."""
        set_generator_state(self.device, self._states[self.settled])

    def _draw(self, index: int) -> None:
        self._generator.set_state(self._states[index])
        self._drawn[index] = torch.empty(self.shape, device=self.device).exponential_(generator=self._generator)
        self._states[index + 1] = self._generator.get_state()
        if len(self._drawn) > self._most:
            del self._drawn[next(iter(self._drawn))]


@contextmanager
def noise_of_call(batch_size: int, vocab_size: int, device: torch.device) -> Iterator[Noise]:
    """Noise that starts where the device's generator stands, and leaves it where plain decoding would.

    Meanwhile the generator gives other numbers, to whoever asks, and to a call that starts in another thread: noise
    that two calls share would make their texts alike. While another thread samples, the generator is left like that.
    """
    me = (str(device), threading.get_ident())
    with _lock:
        noise = Noise(batch_size, vocab_size, device)
        elsewhere = int(torch.randint(2**62, (), device=device))
        set_generator_state(device, torch.Generator(device).manual_seed(elsewhere).get_state())
        _active.append(me)
    try:
        yield noise
    finally:
        with _lock:
            _active.remove(me)
            if all(thread == me[1] for where, thread in _active if where == me[0]):
                noise.leave_behind()


def generator_state(device: torch.device) -> Tensor:
    """Of the device's default generator: uint8, on the CPU."""
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def set_generator_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
