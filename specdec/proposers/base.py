"""`Proposer`: what drafts, and `Context`: what it may look at.

Knows nothing of targets, caches or the loop. A proposer needs `propose` alone; see examples/own_proposer.py.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.models.cache.kv_cache import SpeculativeCache
from specdec.models.cuda_graphs import Recorder
from specdec.models.encoder import EncoderOutputs
from specdec.models.hidden_states import Taps
from specdec.proposers.pacing.pacer import Pacer
from specdec.sampling.draft_tree import DraftTree
from specdec.sampling.logits_processors import NodeProcessors
from specdec.sampling.noise import Noise
from specdec.sampling.results import NewTokens, Verdict
from specdec.utils.device_copies import uploaded

# How far log p of a target scatters around the draft's log q, as a Gumbel's scale: 0.8 for a 0.5B beside a 1.5B, 1.0
# for a head (benchmarks/results/coupling.md).
SPREAD = 0.8
LARGEST_PADDING = 1024  # vocabularies whose sizes differ by more are taken for different ones


@dataclass(frozen=True)
class Context:
    """The state of a batch between two rounds.

    Attributes:
        tokens: (B, T) int64, the text so far in `generate()`'s layout: left padding, prompt, generated tokens.
        pads: left padding of each row. ends: column behind each row's last token, the root.
        active: False for rows that are finished; whatever is drafted for them is ignored.
        budget: how many tokens may be drafted for each row at most.
        sampling: False at T = 0, when drawing a draft is pointless: choose its best.
        chains_only: the target cannot verify trees.
        vocab_size: V, the width of the target's logits.
        processors: the call's logits processors, to bring q close to p.
        pacer: says how far to draft.
        fresh: how many tokens of each row the target was run over since the last context: what the row gained, less
            its root, which is still to come.
        features: (B, W, C) the target's states at those tokens (see `Proposer.taps`), padded on the left; None for
            a proposer without taps.
        target: the model that verifies; a head borrows its embedding. masks: how it takes them, see `ModelRunner`.
        noise: of the call's sampling, where the text follows it (see `coupled_scores`). start: column of its first new token.
        cache: the target's, which holds each row but its root; None where it has none of ours.
        encoder_outputs: what an encoder read, of a target that has one.
        recorder: where drafts may be recorded and replayed; None: they are not.
        written: the new tokens of each row on the host (see `recent`): a look at `tokens` may wait for a device.
        device_budget: (B,) int64, `budget` on the device, 0 for rows that are finished, while a draft is made that may be
            replayed for rows with other room; None: `budget` says it.
    """

    tokens: Tensor
    pads: Sequence[int]
    ends: Sequence[int]
    active: Sequence[bool]
    budget: Sequence[int]
    sampling: bool
    chains_only: bool
    vocab_size: int
    processors: NodeProcessors
    pacer: Pacer
    fresh: Sequence[int] = ()
    features: Tensor | None = None
    target: PreTrainedModel | None = None
    masks: str | None = None
    noise: Noise | None = None
    start: int = 0
    written: Sequence[Sequence[int]] = ()
    cache: SpeculativeCache | None = None
    encoder_outputs: EncoderOutputs | None = None
    recorder: Recorder | None = None
    device_budget: Tensor | None = None

    def coupled_scores(self, scores: Tensor, depth: int, ids: Tensor | None = None) -> Tensor:
        """Scores whose order is that of the race which will choose the token: of q / E in place of q.

        The target's token is the winner of p / E with the column's noise E. Were its log p the draft's log q with
        Gumbel noise of scale s added, token x would be the winner with a chance of softmax((log q - log E) / s).

        Args:
            scores: (B, n, K) float32, log q up to a constant. depth: tokens drafted before these.
            ids: (K,) int64, what the scores are of; None: all tokens.

        Returns:
            (B, n, K) float32: scores of those chances. At T = 0, and under rules that draw drafts, they stay.
        """
        if self.noise is None:
            return scores
        noise = self.noise.at([end - self.start + depth for end in self.ends])  # (B, V)
        noise = noise if ids is None else noise[:, ids.to(noise.device)]
        return (scores - noise[:, None].to(scores.device).clamp(min=1e-30).log()) / SPREAD

    @property
    def room(self) -> Sequence[int]:
        """The old name of `budget`."""
        warnings.warn("Context.room is now Context.budget", DeprecationWarning, stacklevel=2)
        return self.budget

    @property
    def batch_size(self) -> int:
        return len(self.ends)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row's text."""
        return [end - pad for end, pad in zip(self.ends, self.pads, strict=True)]

    @property
    def rows(self) -> list[int]:
        """Indices of the rows worth drafting for."""
        return [b for b, active in enumerate(self.active) if active and self.budget[b] > 0]

    @property
    def host_sync_is_free(self) -> bool:
        """Values can be looked at without waiting for a device to get there."""
        return self.tokens.device.type == "cpu"

    @cached_property
    def _ends(self) -> Tensor:
        return uploaded(list(self.ends), self.tokens.device)[:, None]

    @cached_property
    def root(self) -> Tensor:
        """(B,) int64, each row's last token: node 0 of its tree."""
        if len(set(self.ends)) == 1:
            return self.tokens[:, self.ends[0] - 1]
        return self.tokens.gather(1, self._ends - 1)[:, 0]

    @property
    def drafting_budget(self) -> list[int]:
        """`budget`, 0 for rows that are finished."""
        return [budget if active else 0 for budget, active in zip(self.budget, self.active, strict=True)]

    def short_budget(self, depth: int) -> Tensor | None:
        """(B,) int64, `drafting_budget`; None: all rows have room for drafts of so many tokens."""
        if self.device_budget is not None:
            return self.device_budget
        budget = self.drafting_budget
        return None if min(budget) >= depth else uploaded(budget, self.tokens.device)

    def row(self, b: int) -> Tensor:
        """(T_b,) int64, the whole text of row b, prompt included, without padding."""
        return self.tokens[b, self.pads[b] : self.ends[b]]

    def last_tokens(self, width: int) -> Tensor:
        """(B, width) int64, what each row's text ends in; where a row is shorter, whatever stands in its padding."""
        if len(set(self.ends)) == 1 and self.ends[0] >= width:
            return self.tokens[:, self.ends[0] - width : self.ends[0]]
        place = torch.arange(-width, 0, device=self.tokens.device)
        return self.tokens.gather(1, (self._ends + place).clamp(min=0))

    def recent(self, b: int, count: int) -> list[int]:
        """The last `count` tokens of row b, on the host; of the prompt they are brought there."""
        new = self.written[b] if self.written else ()
        return list(new[len(new) - count :]) if count <= len(new) else self.row(b)[-count:].tolist()

    def source_text(self, b: int) -> list[int]:
        """What an encoder read for row b, as far as the target could write it, too; [] without one."""
        text = [] if self.encoder_outputs is None else self.encoder_outputs.text(b)
        return [token for token in text if token < self.vocab_size]

    def chain(self, drafts: Sequence[Sequence[int]]) -> DraftTree:
        """A deterministic draft of one continuation (any length, also none) per row."""
        if len(drafts) != self.batch_size or any(isinstance(draft, int) for draft in drafts):
            raise TypeError(f"chain() takes a list of tokens for each of the {self.batch_size} rows, got {drafts!r}")
        cut = [list(draft)[: self.budget[b]] if self.active[b] else [] for b, draft in enumerate(drafts)]
        if any(int(token) != token for draft in cut for token in draft):
            raise TypeError(f"chain() takes token ids, got {drafts!r}")
        if any(not 0 <= token < self.vocab_size for draft in cut for token in draft):
            raise ValueError(f"drafted a token outside of the target's vocabulary of {self.vocab_size}")
        longest = max(map(len, cut), default=0)
        if longest == 0:
            return DraftTree.root_only(self.root)
        padded = uploaded([[len(draft), *draft, *[0] * (longest - len(draft))] for draft in cut], self.tokens.device)
        return DraftTree.from_chain(self.root, padded[:, 1:], padded[:, 0])


class Proposer(ABC):
    """Drafts tokens for the target to verify. Whatever it drafts, the output stays the target's.

    A draft must say how it was made: chosen deterministically (`DraftTree.probs` None), or drawn from q, which then
    must be the very distribution drawn from. Whether a token is drafted may depend on q, never on the token sampled.

    Calls share a proposer's weights, settings and learnt costs, and nothing else: each `generate()` drafts with a
    shallow copy of the proposer, which goes when the call ends. What `begin` and later methods set on `self` is that
    call's own; what `__init__` made is shared, by calls in other threads too.
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "follow" in vars(cls) and "sync" not in vars(cls):
            warnings.warn(
                f"{cls.__name__}.follow: Proposer.follow is now Proposer.sync", DeprecationWarning, stacklevel=2
            )
            cls.sync = cls.follow  # type: ignore[attr-defined, method-assign]

    def taps(self, target: PreTrainedModel) -> Taps | None:
        """Which of the target's hidden states this proposer wants to see as `Context.features`."""
        return None

    def check(self, target: PreTrainedModel) -> None:
        """Raise ValueError if this proposer cannot draft for `target`. Called once, at construction."""

    def begin(self, context: Context) -> None:
        """A `generate()` call starts, and this copy of the proposer is its own. `context` holds the prompts."""

    def drafting_model(self) -> nn.Module | None:
        """What drafts are made by passes of, if anything: their cost is known by its shape. Asked after `check`."""
        return None

    def capture(self, compiled: bool) -> None:
        """Passes may be captured as graphs from now on (`SpeculativeGenerator(compile=True)`). Asked after `check`.

        compiled: see `StaticForward`.
        """

    @property
    def drafted_by(self) -> str:
        """What made the last draft, for the report."""
        return type(self).__name__

    @abstractmethod
    def propose(self, context: Context) -> DraftTree:
        """Draft continuations of the rows. `DraftTree.root_only(context.root)` drafts nothing."""

    def sync(self, context: Context) -> None:
        """Another proposer drafts in this round (see `HybridProposer`): take in what will be gone later.

        The text will be in the next context; `fresh` and `features` are of this round alone. `observe` is not called.
        """

    def draft_ahead(self, context: Context, new_tokens: NewTokens) -> None:
        """A device verifies this round's draft: if the next one needs but tensors, it may be asked for already.

        The next `propose` gives it out. context: of this round.
        """

    def observe(self, draft: DraftTree, verdict: Verdict, accepted: Sequence[int]) -> None:
        """A round is over in which this proposer drafted.

        `accepted[b]` drafted tokens of row b, and `verdict.next_token[b]`, are its text now. `verdict.outcome` has all
        of it on the host, with the draft's notes: looking at the tensors would wait for a device.
        """
