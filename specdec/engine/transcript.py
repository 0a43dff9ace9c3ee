"""`Transcript`: the text of a batch whose rows grow at different speeds, with stopping, streaming and recorded outputs.

An output column is *settled* when every unfinished row has reached it. Columns settle in order. Stopping criteria and
the streamer get each settled column once, with the tensors that plain decoding would give them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria

from specdec.engine.records import Records
from specdec.models.output import Output
from specdec.sampling.results import RoundResult
from specdec.utils.device_copies import uploaded, write_into

FEW = 4  # rows; the new tokens of more are copied on the device, in a fixed number of launches


@dataclass
class Transcript:
    """The text of B rows in `generate()`'s layout: column c of row b is its position c - pads[b].

    Args:
        prompt: (B, T) int64, left-padded.
        pads: number of padding columns of each row.
        criteria: stopping criteria, evaluated once per settled column.
        pad_token: fills finished rows; None if no criterion has end tokens, so that rows do not finish one by one.
        order: (B, T) int64, the prompt's columns with all padding first; None if the padding is on the left already.
        streamer: receives each settled column, as in plain decoding.
        max_length: number of columns at which the criteria stop all rows, which limits the draft; None if unknown.
        reach: number of columns that each row can fill before the target runs out of positions, which limits the draft
            as well; None if positions are unlimited.
        records: receives the requested outputs.
    """

    prompt: Tensor
    pads: list[int]
    criteria: StoppingCriteriaList
    pad_token: int | None
    order: Tensor | None = None
    streamer: Any = None
    max_length: int | None = None
    reach: Sequence[int] | None = None
    records: Records = field(default_factory=Records)

    def __post_init__(self) -> None:
        B, T = self.prompt.shape
        if self.max_length is not None:
            self.max_length = max(self.max_length, T + 1)  # plain decoding writes a token before it asks its criteria
        self._prompt = None if self.order is None else self.prompt.gather(1, self.order.to(self.prompt.device))
        self.start = self.settled = T
        self.tokens = self.prompt  # (B, columns), padded after each row's end
        self.written: list[list[int]] = [[] for _ in range(B)]  # new tokens of each row, on the host
        self.ends = [T] * B  # column after each row's last token
        self.closed = [False] * B  # rows that have ended: padding follows
        self._ended_at: list[int | None] = [None] * B  # column after the last token of each of these
        self.done = False
        self._drafted: list[list[bool]] = [[] for _ in range(B)]
        self._unfinished = [True] * B
        self._hold: int | None = None  # column at which rows wait for the others
        on_tokens = [criterion for criterion in self.criteria if _ends_on_tokens_alone(criterion)]
        self._others = [criterion for criterion in self.criteria if not _ends_on_tokens_alone(criterion)]
        self._stop_tokens = {token for made in on_tokens for token in made.eos_token_id.flatten().tolist()}
        # Drafting for a row ends with its first token of these.
        self._end_tokens = set() if self.pad_token is None else self._stop_tokens

    @property
    def batch_size(self) -> int:
        return len(self.ends)

    @property
    def padded_left(self) -> Tensor:
        """Text (B, columns) int64 for proposers, with all padding on the left."""
        return self.tokens if self._prompt is None else torch.cat([self._prompt, self.tokens[:, self.start :]], 1)

    @property
    def filler(self) -> int:
        """Token that fills the columns after a row's end."""
        return 0 if self.pad_token is None else self.pad_token

    @property
    def text_ends(self) -> list[int]:
        """Column after each row's last token that is not padding."""
        return [end if at is None else min(end, at) for end, at in zip(self.ends, self._ended_at, strict=True)]

    @property
    def active(self) -> list[bool]:
        """True for rows that need further tokens from the target."""
        return [not closed and self._has_budget(b) for b, closed in enumerate(self.closed)]

    @property
    def padding(self) -> list[bool]:
        """True for finished rows that continue with pad tokens, because `records.wanted`."""
        return [closed and self.records.wanted and self._has_budget(b) for b, closed in enumerate(self.closed)]

    @property
    def growing(self) -> list[bool]:
        """True for each row that gets tokens in a round: active rows, and rows that continue with padding."""
        return [active or padding for active, padding in zip(self.active, self.padding, strict=True)]

    @property
    def finished(self) -> list[bool]:
        """True for rows that are no longer run: padding follows their text."""
        return [closed and not padding for closed, padding in zip(self.closed, self.padding, strict=True)]

    @property
    def budget(self) -> list[int]:
        """Number of tokens that may be drafted for each row: one less than it may grow by."""
        most = self.max_length if self.max_length is not None else max(self.ends) + 1024
        columns = [most] * self.batch_size if self.reach is None else [min(most, reach) for reach in self.reach]
        return [max(0, most - end - 1) for most, end in zip(columns, self.ends, strict=True)]

    @property
    def deepest(self) -> list[int] | None:
        """Largest depth at which to run each row's nodes, so that the target has a position for all of them.

        -1, the position of the last token in the cache, for rows that get no token. None if positions are unlimited.
        """
        if self.reach is None:
            return None
        return [budget if grows else -1 for budget, grows in zip(self.budget, self.growing, strict=True)]

    def write(self, result: RoundResult, output: Output | None = None) -> None:
        """Append a round's tokens that the text does not have yet, and record the outputs that the caller requested.

        Args:
            result: the result of the round.
            output: output of its target pass; None if no outputs were requested.
        """
        host, first = result.host(), result.written
        if result.hold is not None:
            self._hold = result.hold
        accepted = [count - first for count in host.accepted]
        if output is not None and self.records.wanted:
            for b in (b for b, grows in enumerate(self.growing) if grows):
                path = host.path[b][first:][: accepted[b] + 1]
                self.records.add(b, path, output, result.scores[first:])
        self._append([row[first:] for row in host.tokens], accepted, None if first else result.tokens)

    def _append(self, tokens: Sequence[Sequence[int]], drafted: Sequence[int], device_tokens: Tensor | None) -> None:
        """Append new tokens to the rows, up to the first end token of each.

        Args:
            tokens: new tokens of each row, in order.
            drafted: number of accepted draft tokens among them, which come first.
            device_tokens: (B, D) int64, the same tokens on the text's device, with anything after each row's own; None
                to copy them from the host.
        """
        kept, writing, padding, before = [], self.active, self.padding, list(self.ends)
        for b, new in enumerate(tokens):
            new = list(new)
            if not (writing[b] or padding[b]):
                new = []
            for i, token in enumerate(new):
                if token in self._end_tokens and not self.closed[b]:
                    new = new[: i + 1]
                    self.closed[b], self._ended_at[b] = True, self.ends[b] + i + 1
                    self.records.truncate(b, self.ends[b] - self.start + i + 1)
                    break
            kept.append(len(new))
            self.written[b] += new
            self._drafted[b] += [i < drafted[b] for i in range(len(new))]
            self.ends[b] += len(new)
        self._copy(before, kept, device_tokens)

    def padded(self, b: int, columns: int) -> Tensor:
        """Text (columns,) int64 of a finished row, with padding."""
        self._reserve(columns)
        return self.tokens[b, :columns]

    def _copy(self, before: Sequence[int], kept: Sequence[int], device_tokens: Tensor | None) -> None:
        """Copy the last `kept[b]` tokens of each row into `tokens`, starting at column `before[b]`."""
        device = self.tokens.device
        if device_tokens is None or device.type == "cpu" or len(kept) <= FEW:
            self._reserve(max(self.ends))
            for b, (column, count) in enumerate(zip(before, kept, strict=True)):
                if count:
                    write_into(self.tokens[b, column : column + count], self.written[b][-count:])
            return
        self._reserve(max(before) + device_tokens.shape[1])
        first, count = uploaded([before, kept], device)[..., None]  # (B, 1) each
        place = torch.arange(device_tokens.shape[1], device=device)
        new = torch.where(place < count, device_tokens.to(device), self.filler)  # the rest is filler already
        self.tokens.scatter_(1, first + place, new)

    def settle(self) -> None:
        """Settle every column that all unfinished rows have reached; set `done` once plain decoding would stop.

        Raises:
            RuntimeError: no row can grow, yet the criteria do not stop the text.
        """
        while not self.done and self.settled < self._frontier():
            column = self.settled
            self._reserve(column + 1)
            self.settled += 1
            stops = self._stops(column)
            if self.streamer is not None:
                self._stream(column)
            ended = [alive and stop for alive, stop in zip(self._unfinished, stops, strict=True)]
            self._unfinished = [alive and not stop for alive, stop in zip(self._unfinished, stops, strict=True)]
            self.done = not any(self._unfinished)
            if self.pad_token is not None:
                for b in (b for b, now in enumerate(ended) if now):
                    self._close(b)
        if self._stuck:
            self._hold = None  # all rows have reached the column
        if self._stuck:
            raise RuntimeError(
                f"no row can grow after column {self.settled}, but the stopping criteria do not end the text: "
                f"{', '.join(type(criterion).__name__ for criterion in self.criteria)}. Each must stop a row at "
                "its own end tokens (eos_token_id) and all rows at its own max_length."
            )

    @property
    def _stuck(self) -> bool:
        return not self.done and not any(self.active) and not any(self.padding)

    def _stops(self, column: int) -> list[bool]:
        """Evaluate the stopping criteria for each row at this column.

        Criteria that use only the last token, the length or the clock are evaluated on the host, without a sync.
        """
        scores = self.records.settle_scores(column - self.start)
        stops = [token in self._stop_tokens for token in self._column(column)]
        for criterion in self._others:
            if type(criterion) in (MaxLengthCriteria, MaxTimeCriteria):
                result = criterion(
                    torch.zeros((), dtype=torch.long, device="cpu").expand(len(stops), column + 1), scores
                )
            else:
                result = criterion(self.tokens[:, : column + 1], scores)
            result = torch.as_tensor(result).expand(len(stops)).tolist()  # some return one value for all rows
            stops = [stop or bool(also) for stop, also in zip(stops, result, strict=True)]
        return stops

    def _stream(self, column: int) -> None:
        if hasattr(self.streamer, "on_accept"):
            marks = [row[column - self.start] if column - self.start < len(row) else False for row in self._drafted]
            self.streamer.on_accept(marks[0] if self.batch_size == 1 else marks)
        self.streamer.put(torch.tensor(self._column(column), device="cpu"))

    def _column(self, column: int) -> list[int]:
        """Tokens of all rows in a column after the prompt."""
        place = column - self.start
        return [row[place] if place < len(row) else self.filler for row in self.written]

    def _frontier(self) -> int:
        """Column up to which the output is known for all rows."""
        if self.records.wanted:
            return min(self.ends)
        open_ends = [end for end, closed in zip(self.ends, self.closed, strict=True) if not closed]
        return min(open_ends) if open_ends else max(self.ends)

    def _close(self, b: int) -> None:
        """Finish row b at the column just settled, and drop the tokens that it has after it, end tokens included."""
        if self.closed[b] and self._column(self.settled - 1)[b] in self._end_tokens:
            return  # only padding follows
        self.closed[b], self._ended_at[b] = True, self.settled
        self.tokens[b, self.settled :] = self.filler
        del self.written[b][self.settled - self.start :]
        self.ends[b] = self.settled
        del self._drafted[b][self.settled - self.start :]
        self.records.truncate(b, self.settled - self.start)

    def _has_budget(self, b: int) -> bool:
        end = self.ends[b]
        if any(limit is not None and end >= limit for limit in (self.max_length, self._hold)):
            return False
        # A row without further positions waits until its column settles, since a criterion may end it there. Otherwise
        # its next pass fails as in plain decoding.
        return self.reach is None or end < self.reach[b] or end == self.settled

    def _reserve(self, columns: int) -> None:
        have = self.tokens.shape[1]
        if have < columns:
            extra = max(columns - have, 256)
            self.tokens = torch.nn.functional.pad(self.tokens, (0, extra), value=self.filler)

    # Outputs of generate()

    @property
    def sequences(self) -> Tensor:
        """Settled text (B, settled) int64."""
        return self.tokens[:, : self.settled].clone()

    @property
    def num_output_tokens(self) -> int:
        """New tokens of all rows up to their ends, padding not counted."""
        return sum(min(end, self.settled) - self.start for end in self.text_ends)


def _ends_on_tokens_alone(criterion: Any) -> bool:
    """True for transformers' own `EosTokenCriteria`, but not for subclasses that override it or look-alikes."""
    return isinstance(criterion, EosTokenCriteria) and type(criterion).__call__ is EosTokenCriteria.__call__
