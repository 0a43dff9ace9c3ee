"""`Noise`: the exponential noise of a call's sampling, per output column, row and token, as plain decoding draws it.

Plain `generate()` samples with `torch.multinomial(p, 1)`, which is `argmax(p / E)` with fresh exponential noise E
(torch 2.13, aten/native/Distributions.cpp): the Gumbel-max trick, which chooses token x with probability p(x). Here E
belongs to the output column instead of the pass. The token at a column is `argmax(p / E)` of that column, independent
of the draft. So the text depends on the seed only, and it is that of plain decoding. Its distribution is the target's,
since p never depends on the noise of a later column. A draft may use E to predict the chosen token (Gumbel coupling,
arXiv 2408.07978).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from specdec.utils.device_copies import uploaded

KEPT_BYTES = 256 * 2**20  # memory for drawn columns; others are drawn again from the generator state kept for them
_active: list[tuple[str, int]] = []  # (device, thread) of the calls that are sampling
generator_lock = threading.Lock()  # held while the state of a default generator is replaced


class Noise:
    """Exponential noise for B rows of V tokens, by output column (0 for the first new token).

    Args:
        batch_size: B.
        vocab_size: V.
        device: device of the noise. It starts from the state of this device's default generator.

    Examples:
        >>> _ = torch.manual_seed(0)
        >>> noise = Noise(1, 4, torch.device("cpu"))
        >>> probs = torch.tensor([[0.1, 0.2, 0.3, 0.4]])
        >>> (probs / noise.column(0)).argmax(-1) == torch.multinomial(probs, 1)[:, 0]
        tensor([True])
    """

    def __init__(self, batch_size: int, vocab_size: int, device: torch.device):
        self.shape, self.device = (batch_size, vocab_size), device
        self._sizes: dict[int, int] = {}  # by column, the tokens that its noise is drawn for, if not for all
        self.settled = 0  # columns whose tokens are final
        self._generator = torch.Generator(device)
        self._states = {0: generator_state(device)}  # by column, the state before its noise is drawn
        self._drawn: dict[int, Tensor] = {}  # by column, the most recently used last
        self._most = max(1, KEPT_BYTES // (4 * batch_size * vocab_size))

    def fit(self, column: int, tokens: int) -> None:
        """Draw a column that is not settled for so many tokens alone: a logits processor may drop the last ones.

        The others have infinite noise, with which no token is chosen. The columns after it are drawn anew, and for as
        many tokens until they are fitted.
        """
        if column >= self.settled and tokens != self._size(column):
            self._sizes = {known: size for known, size in self._sizes.items() if known < column} | {column: tokens}
            self._drawn = {known: drawn for known, drawn in self._drawn.items() if known < column}
            self._states = {known: state for known, state in self._states.items() if known <= column}

    def column(self, index: int) -> Tensor:
        """(B, V) float32, the noise of a column that is not settled."""
        for missing in range(max(self._states), index):
            self._draw(missing)
        if index not in self._drawn:
            self._draw(index)
        kept = self._drawn[index] = self._drawn.pop(index)
        return kept

    def at(self, columns: Sequence[int]) -> Tensor:
        """(B, V) float32, the noise of each row's own column."""
        columns = [max(column, self.settled) for column in columns]  # finished rows: any noise will do
        if len(set(columns)) == 1:
            return self.column(columns[0])
        return torch.stack([self.column(column)[b] for b, column in enumerate(columns)])

    def ahead(self, columns: Sequence[int], count: int) -> Tensor:
        """(B, count, V) float32, the noise of `count` columns per row, from the row's own column on."""
        asked = [[max(column + more, self.settled) for more in range(count)] for column in columns]
        every = sorted({column for row in asked for column in row})
        if asked.count(asked[0]) == len(asked) or len(every) > 2 * count:  # rows far apart would take much memory
            drawn = [self.at(at_depth) for at_depth in zip(*asked, strict=True)]
            return torch.stack(drawn, 1) if count > 1 else drawn[0][:, None]
        place = uploaded([[every.index(column) for column in row] for row in asked], self.device)  # (B, count)
        rows = torch.arange(len(asked), device=self.device)[:, None]
        return torch.stack([self.column(column) for column in every])[place, rows]

    def settle(self, columns: int) -> None:
        """Mark the first `columns` columns as final and free their noise."""
        if columns > self.settled:
            self.column(columns - 1)
        self.settled = columns
        for kept in (self._states, self._drawn):
            for column in [column for column in kept if column < columns]:
                del kept[column]

    def advance_generator(self) -> None:
        """Put the device's default generator into the state that plain decoding leaves after the settled columns."""
        set_generator_state(self.device, self._states[self.settled])

    def _size(self, column: int) -> int:
        fitted = max((known for known in self._sizes if known <= column), default=None)
        return self.shape[1] if fitted is None else self._sizes[fitted]

    def _draw(self, index: int) -> None:
        self._generator.set_state(self._states[index])
        rows, vocab_size = self.shape
        drawn = torch.empty(rows, self._size(index), device=self.device).exponential_(generator=self._generator)
        missing = max(0, vocab_size - drawn.shape[1])
        self._drawn[index] = nn.functional.pad(drawn, (0, missing), value=float("inf")) if missing else drawn
        self._states[index + 1] = self._generator.get_state()
        if len(self._drawn) > self._most:
            del self._drawn[next(iter(self._drawn))]


@contextmanager
def noise_of_call(batch_size: int, vocab_size: int, device: torch.device) -> Iterator[Noise]:
    """Noise that starts from the device's generator state and leaves the state that plain decoding would leave.

    In between the default generator is reseeded, so that a call in another thread gets different noise: shared noise
    would correlate their texts. If another thread is still sampling at the end, the generator stays reseeded.

    Args:
        batch_size: B.
        vocab_size: V.
        device: device of the noise.

    Examples:
        >>> with noise_of_call(2, 10, torch.device("cpu")) as noise:
        ...     noise.column(0).shape
        torch.Size([2, 10])
    """
    me = (str(device), threading.get_ident())
    with generator_lock:
        noise = Noise(batch_size, vocab_size, device)
        elsewhere = int(torch.randint(2**62, (), device=device))
        set_generator_state(device, torch.Generator(device).manual_seed(elsewhere).get_state())
        _active.append(me)
    try:
        yield noise
    finally:
        with generator_lock:
            _active.remove(me)
            if all(thread == me[1] for where, thread in _active if where == me[0]):
                noise.advance_generator()


def generator_state(device: torch.device) -> Tensor:
    """State of a device's default generator: (n,) uint8, on the CPU.

    Examples:
        >>> generator_state(torch.device("cpu")).dtype
        torch.uint8
    """
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def set_generator_state(device: torch.device, state: Tensor) -> None:
    """Set the state of a device's default generator.

    Examples:
        >>> cpu = torch.device("cpu")
        >>> set_generator_state(cpu, generator_state(cpu))
    """
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
