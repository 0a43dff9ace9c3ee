"""`Transcript`: the text of a batch while its rows run ahead of each other, and what `generate()` makes of it.

Owns tokens, stopping, streaming and the recorded outputs. Rows gain tokens at their own pace; a column of the output is
*settled* when every unfinished row has reached it, in the order and with the tensors plain decoding would have used:
stopping criteria see each column once, the streamer gets it once. Knows nothing of drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria

from specdec.models.output import Output
from specdec.utils.device_copies import uploaded


@dataclass
class Records:
    """Per row, what the caller asked to get back: one entry per token that was chosen.

    Attributes:
        scores: processed (V,) float32 scores. logits: raw ones. hidden_states: per token, one (H,) per layer.
        prompt_hidden_states: per layer (B, T, H), of the prefill.
        wanted: something beside the text is returned, the cache at least: finished rows go on with pad tokens as in
            plain decoding, instead of being left alone.
    """

    scores: list[list[Tensor]] | None = None
    logits: list[list[Tensor]] | None = None
    hidden_states: list[list[tuple[Tensor, ...]]] | None = None
    prompt_hidden_states: tuple[Tensor, ...] | None = None
    wanted: bool = False

    def truncate(self, b: int, tokens: int) -> None:
        """Forget what row b recorded behind its first `tokens` tokens."""
        for kept in (self.scores, self.logits):
            if kept is not None:
                del kept[b][tokens:]
        if self.hidden_states is not None:
            del self.hidden_states[b][max(0, tokens - 1) :]


@dataclass
class Transcript:
    """The text of B rows in `generate()`'s layout: column c of row b is its position c - pads[b].

    Args:
        prompt: (B, T) int64, left-padded.
        pads: columns of padding of each row.
        order: (B, T) int64, the prompt's columns with all padding first, where some of it is not on the left.
        criteria: asked once per settled column.
        pad_token: what finished rows are filled with; None if rows without an end token never finish on their own.
        streamer: gets each settled column, as plain decoding would give it.
        max_length: columns at which the criteria are known to end everything; bounds the draft. None: unknown.
        reach: of each row, the columns that it can fill before the target has no position left for another pass;
            bounds the draft as well. None: there are positions for any text.
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
        self._prompt = None if self.order is None else self.prompt.gather(1, self.order.to(self.prompt.device))
        self.start = self.settled = T
        self.tokens = self.prompt  # (B, columns), padded behind each row's end
        self.written: list[list[int]] = [[] for _ in range(B)]  # new tokens of each row, on the host
        self.ends = [T] * B  # column behind each row's last token
        self.closed = [False] * B  # ended: pads follow
        self.done = False
        self._drafted: list[list[bool]] = [[] for _ in range(B)]
        self._unfinished = [True] * B
        self._held: int | None = None  # column at which rows wait for those before it
        self._settled_scores: list[Tensor] = []
        on_tokens = [criterion for criterion in self.criteria if _ends_on_tokens_alone(criterion)]
        self._others = [criterion for criterion in self.criteria if not _ends_on_tokens_alone(criterion)]
        self._stop_tokens = {token for made in on_tokens for token in made.eos_token_id.flatten().tolist()}
        # Rows stop being drafted for as soon as they hold one of these.
        self._end_tokens = set() if self.pad_token is None else self._stop_tokens

    @property
    def batch_size(self) -> int:
        return len(self.ends)

    @property
    def padded_left(self) -> Tensor:
        """(B, columns) int64, the text as proposers see it, whose padding is all on the left."""
        return self.tokens if self._prompt is None else torch.cat([self._prompt, self.tokens[:, self.start :]], 1)

    @property
    def filler(self) -> int:
        """The token behind a row's end."""
        return 0 if self.pad_token is None else self.pad_token

    @property
    def active(self) -> list[bool]:
        """Rows whose next tokens are wanted from the target."""
        return [not closed and self._has_budget(b) for b, closed in enumerate(self.closed)]

    @property
    def padding(self) -> list[bool]:
        """Finished rows that go on with pad tokens because the caller wants their scores or hidden states too."""
        return [closed and self.records.wanted and self._has_budget(b) for b, closed in enumerate(self.closed)]

    @property
    def finished(self) -> list[bool]:
        """Rows that are not run any more: padding follows their text."""
        return [closed and not padding for closed, padding in zip(self.closed, self.padding, strict=True)]

    @property
    def budget(self) -> list[int]:
        """How many tokens may be drafted for each row: one less than it may gain."""
        most = self.max_length if self.max_length is not None else max(self.ends) + 1024
        columns = [most] * self.batch_size if self.reach is None else [min(most, reach) for reach in self.reach]
        return [max(0, most - end - 1) for most, end in zip(columns, self.ends, strict=True)]

    @property
    def deepest(self) -> list[int] | None:
        """Depth at which each row's nodes are run at most, so that the target has a position for all of them.

        -1 for rows that gain nothing: that is the last token that was read. None: there are positions for any node.
        """
        if self.reach is None:
            return None
        gaining = [alive or padding for alive, padding in zip(self.active, self.padding, strict=True)]
        return [budget if gains else -1 for budget, gains in zip(self.budget, gaining, strict=True)]

    def append(
        self, tokens: Sequence[Sequence[int]], drafted: Sequence[int], device_tokens: Tensor | None = None
    ) -> list[int]:
        """Give each row its new tokens; returns how many it kept (a row keeps none behind its end token).

        Args:
            tokens: per row, in order. drafted: how many of them were accepted draft tokens.
            device_tokens: (B, D) the same where the text is, each row's first ones; None: they are only known here.
        """
        kept, writing, padding, before = [], self.active, self.padding, list(self.ends)
        for b, new in enumerate(tokens):
            new = list(new)
            if not (writing[b] or padding[b]):
                new = []
            for i, token in enumerate(new):
                if token in self._end_tokens and not self.closed[b]:
                    new = new[: i + 1]
                    self.closed[b] = True
                    self.records.truncate(b, self.ends[b] - self.start + i + 1)
                    break
            kept.append(len(new))
            self.written[b] += new
            self._drafted[b] += [i < drafted[b] for i in range(len(new))]
            self.ends[b] += len(new)
        self._write(before, kept, device_tokens)
        return kept

    def hold(self, column: int) -> None:
        """Have rows that are this far wait until all others are: the next token there cannot be chosen before."""
        self._held = column

    def padded(self, b: int, columns: int) -> Tensor:
        """(columns,) int64, a finished row and its padding."""
        self._reserve(columns)
        return self.tokens[b, :columns]

    def _write(self, before: Sequence[int], kept: Sequence[int], device_tokens: Tensor | None) -> None:
        """Put the last `kept[b]` tokens of each row into `tokens`, from column `before[b]` on."""
        device = self.tokens.device
        if device_tokens is None or device.type == "cpu":
            self._reserve(max(self.ends))
            for b, (column, count) in enumerate(zip(before, kept, strict=True)):
                if count:
                    self.tokens[b, column : column + count] = uploaded(self.written[b][-count:], device)
            return
        self._reserve(max(before) + device_tokens.shape[1])
        first, count = uploaded([before, kept], device)[..., None]  # (B, 1) each
        place = torch.arange(device_tokens.shape[1], device=device)
        new = torch.where(
            place < count, device_tokens.to(device), self.filler
        )  # behind a row's end is the filler anyway
        self.tokens.scatter_(1, first + place, new)

    def record(
        self, path: Sequence[Sequence[int]], accepted: Sequence[int], output: Output, scores: Sequence[Tensor]
    ) -> None:
        """Keep, for each token that `append` is about to get, what it was chosen from.

        Args:
            path: (B, D); token i of row b was chosen after node path[b][i], i from 0 to accepted[b].
            output: of the target's pass. scores: processed (B, V), one per token.
        """
        records = self.records
        if not records.wanted:
            return
        for b, (wanted, padding) in enumerate(zip(self.active, self.padding, strict=True)):
            for i, node in enumerate(path[b][: accepted[b] + 1] if wanted or padding else ()):
                if records.scores is not None:
                    records.scores[b].append(scores[i][b].clone())
                if records.logits is not None:
                    records.logits[b].append(output.logits[b, node].float())
                if records.hidden_states is not None and output.hidden_states is not None:
                    records.hidden_states[b].append(tuple(states[b, node].clone() for states in output.hidden_states))

    def settle(self) -> None:
        """Settle every column that all unfinished rows have reached; sets `done` once plain decoding would stop."""
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
            self._held = None  # all have arrived
        if self._stuck:
            raise RuntimeError(
                f"no row can gain a token behind column {self.settled}, and yet the stopping criteria do not end the "
                f"text: {', '.join(type(criterion).__name__ for criterion in self.criteria)}. One of them has end "
                "tokens or a maximum length that it does not keep to."
            )

    @property
    def _stuck(self) -> bool:
        return not self.done and not any(self.active) and not any(self.padding)

    def _stops(self, column: int) -> list[bool]:
        """What the criteria say of each row once this column is written. Those that look at the text are shown it;
        those known to look at the last token or at the clock are not worth a wait for the device."""
        scores = self._score_column(column)
        stops = [token in self._stop_tokens for token in self._column(column)]
        for criterion in self._others:
            if type(criterion) in (MaxLengthCriteria, MaxTimeCriteria):
                said = criterion(torch.zeros((), dtype=torch.long, device="cpu").expand(len(stops), column + 1), scores)
            else:
                said = criterion(self.tokens[:, : column + 1], scores)
            said = torch.as_tensor(said).expand(len(stops)).tolist()  # some say one thing for all rows
            stops = [stop or bool(also) for stop, also in zip(stops, said, strict=True)]
        return stops

    def _stream(self, column: int) -> None:
        if hasattr(self.streamer, "on_accept"):
            marks = [row[column - self.start] if column - self.start < len(row) else False for row in self._drafted]
            self.streamer.on_accept(marks[0] if self.batch_size == 1 else marks)
        self.streamer.put(torch.tensor(self._column(column), device="cpu"))

    def _column(self, column: int) -> list[int]:
        """The tokens of all rows in a column behind the prompt."""
        place = column - self.start
        return [row[place] if place < len(row) else self.filler for row in self.written]

    def _frontier(self) -> int:
        """Column up to which the output is known."""
        if self.records.wanted:
            return min(self.ends)
        open_ends = [end for end, closed in zip(self.ends, self.closed, strict=True) if not closed]
        return min(open_ends) if open_ends else max(self.ends)

    def _close(self, b: int) -> None:
        """Row b is finished with the column just settled: what it wrote behind it was never asked for, be it an end
        token that it ran ahead to."""
        if self.closed[b] and self._column(self.settled - 1)[b] in self._end_tokens:
            return  # behind it there is padding alone
        self.closed[b] = True
        self.tokens[b, self.settled :] = self.filler
        del self.written[b][self.settled - self.start :]
        self.ends[b] = self.settled
        del self._drafted[b][self.settled - self.start :]
        self.records.truncate(b, self.settled - self.start)

    def _has_budget(self, b: int) -> bool:
        end = self.ends[b]
        if any(limit is not None and end >= limit for limit in (self.max_length, self._held)):
            return False
        # Where a row's positions end it waits for the others: criteria that have seen all rows may end it there. If
        # they do not, its next pass fails as in plain decoding.
        return self.reach is None or end < self.reach[b] or end == self.settled

    def _reserve(self, columns: int) -> None:
        have = self.tokens.shape[1]
        if have < columns:
            extra = max(columns - have, 256)
            self.tokens = torch.nn.functional.pad(self.tokens, (0, extra), value=self.filler)

    def _score_column(self, column: int) -> tuple[Tensor, ...] | None:
        if self.records.scores is None:
            return None
        self._settled_scores.append(torch.stack([row[column - self.start] for row in self.records.scores]))
        return tuple(self._settled_scores)

    # What generate() returns

    @property
    def sequences(self) -> Tensor:
        """(B, settled) int64."""
        return self.tokens[:, : self.settled].clone()

    @property
    def num_output_tokens(self) -> int:
        """New tokens of all rows up to their ends, padding not counted."""
        return sum(min(end, self.settled) - self.start for end in self.ends)

    def recorded(self) -> dict[str, Any]:
        """`scores`, `logits` and `hidden_states` in `generate()`'s form, None where not asked for."""
        steps = self.settled - self.start
        records, logits, hidden = self.records, None, None
        if records.logits is not None:
            logits = tuple(torch.stack([row[t] for row in records.logits]) for t in range(steps))
        if records.hidden_states is not None and records.prompt_hidden_states is not None:
            later = []
            for t in range(steps - 1):
                layers = zip(*(row[t] for row in records.hidden_states), strict=True)  # per layer, B of (H,)
                later.append(tuple(torch.stack(states)[:, None] for states in layers))
            hidden = (records.prompt_hidden_states, *later)
        scores = tuple(self._settled_scores) if self.records.scores is not None else None
        return {"scores": scores, "logits": logits, "hidden_states": hidden}


def _ends_on_tokens_alone(criterion: Any) -> bool:
    """It ends a row whenever that holds one of its tokens: transformers' rule, not any with such an attribute."""
    return isinstance(criterion, EosTokenCriteria) and type(criterion).__call__ is EosTokenCriteria.__call__
