"""`Proposer`, the base class of everything that drafts, and `Context`, its view of the batch.

A proposer has to implement `propose` only; see examples/own_proposer.py.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
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

# Gumbel scale of the target's log p around the draft's log q: 0.8 for a 0.5B draft of a 1.5B target, 1.0 for a head
# (benchmarks/results/coupling.md).
SPREAD = 0.8
LARGEST_PADDING = 1024  # vocabularies whose sizes differ by more are treated as different ones


@dataclass(frozen=True)
class Context:
    """The state of a batch between two rounds, as a proposer sees it.

    Attributes:
        tokens: (B, T) int64, the text so far in `generate()`'s layout: left padding, prompt, generated tokens.
        pads: B ints, left padding of each row.
        ends: B ints, the column after each row's last token. This last token is the row's root.
        active: B bools, False for finished rows. Drafts for them are ignored.
        budget: B ints, the largest number of tokens to draft for each row.
        sampling: False at T = 0, where a draft should be the most probable token instead of a drawn one.
        chains_only: True if the target cannot verify trees.
        vocab_size: V, the width of the target's logits.
        processors: the call's logits processors, which bring q closer to p.
        pacer: decides how far to draft.
        fresh: B ints, tokens that the target has processed since the last context: the new ones except the root.
        features: (B, W, C), the target's hidden states at the `fresh` tokens (see `Proposer.taps`), left-padded. None
            for a proposer without taps.
        target: the target model. Heads borrow its embedding.
        masks: the form in which the target takes an attention mask, see `ModelRunner`.
        noise: the noise that the call samples with, if the rule shares it with drafts (see `coupled_scores`).
        start: the column of the first new token.
        written: the new tokens of each row on the host (see `recent`). Reading `tokens` may need a host sync.
        cache: the target's cache, which holds each row except its root. None if the caller provides none.
        encoder_outputs: the encoder outputs of an encoder-decoder target.
        recorder: captures and replays drafts as CUDA graphs. None if drafts run eagerly.
        device_budget: (B,) int64, `budget` on the device, 0 for finished rows. Set while a draft is captured, since a
            replay may have another budget.

    Example:
        ```python
        def propose(self, context: Context) -> DraftTree:  # repeat the last two tokens
            return context.chain([context.recent(b, 2) for b in range(context.batch_size)])
        ```
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
        """Rank tokens by q / E, using the exponential noise E that the target will sample with.

        The target's token is argmax(p / E). If log p is log q plus Gumbel noise of scale s, this token is x with
        probability softmax((log q - log E) / s)[x]. See Gumbel coupling, arXiv 2408.07978.

        Args:
            scores: (B, n, K) float32, log q up to a constant.
            depth: the number of tokens drafted before these.
            ids: (K,) int64, the tokens that the scores belong to. None: all tokens.

        Returns:
            (B, n, K) float32, log-probabilities up to a constant. Unchanged at T = 0 and without shared noise.
        """
        if self.noise is None:
            return scores
        noise = self.noise.at([end - self.start + depth for end in self.ends])  # (B, V)
        noise = noise if ids is None else noise[:, ids.to(noise.device)]
        return (scores - noise[:, None].to(scores.device).clamp(min=1e-30).log()) / SPREAD

    @property
    def room(self) -> Sequence[int]:
        """Deprecated name of `budget`."""
        warnings.warn("Context.room is now Context.budget", DeprecationWarning, stacklevel=2)
        return self.budget

    @property
    def batch_size(self) -> int:
        return len(self.ends)

    @property
    def lengths(self) -> list[int]:
        """Number of tokens in each row's text, without padding."""
        return [end - pad for end, pad in zip(self.ends, self.pads, strict=True)]

    @property
    def rows(self) -> list[int]:
        """Indices of the rows to draft for: active and with a budget."""
        return [b for b, active in enumerate(self.active) if active and self.budget[b] > 0]

    @property
    def host_sync_is_free(self) -> bool:
        """True on the CPU, where reading a tensor's values does not wait for a device."""
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
        """The `budget` of each row, 0 for finished rows."""
        return [budget if active else 0 for budget, active in zip(self.budget, self.active, strict=True)]

    def short_budget(self, depth: int) -> Tensor | None:
        """(B,) int64, `drafting_budget` on the device. None if every row has a budget of at least `depth` tokens."""
        if self.device_budget is not None:
            return self.device_budget
        budget = self.drafting_budget
        return None if min(budget) >= depth else uploaded(budget, self.tokens.device)

    def row(self, b: int) -> Tensor:
        """The whole text of row b, (T_b,) int64, including the prompt, without padding."""
        return self.tokens[b, self.pads[b] : self.ends[b]]

    def last_tokens(self, width: int) -> Tensor:
        """The last `width` tokens of each row, (B, width) int64. Shorter rows begin with their padding."""
        if len(set(self.ends)) == 1 and self.ends[0] >= width:
            return self.tokens[:, self.ends[0] - width : self.ends[0]]
        place = torch.arange(-width, 0, device=self.tokens.device)
        return self.tokens.gather(1, (self._ends + place).clamp(min=0))

    def recent(self, b: int, count: int) -> list[int]:
        """The last `count` tokens of row b on the host. Tokens of the prompt are copied from the device."""
        new = self.written[b] if self.written else ()
        return list(new[len(new) - count :]) if count <= len(new) else self.row(b)[-count:].tolist()

    def source_text(self, b: int) -> list[int]:
        """The encoder's input for row b, without tokens outside the target's vocabulary; [] without an encoder."""
        text = [] if self.encoder_outputs is None else self.encoder_outputs.text(b)
        return [token for token in text if token < self.vocab_size]

    def chain(self, drafts: Sequence[Sequence[int]]) -> DraftTree:
        """Build a deterministic draft from one continuation per row.

        Args:
            drafts: for each of the B rows a list of token ids, possibly empty. Each is cut to the row's budget.

        Returns:
            The draft as a chain.

        Raises:
            TypeError: `drafts` is not one list of ints per row.
            ValueError: a token is outside the target's vocabulary.
        """
        if len(drafts) != self.batch_size or any(isinstance(draft, int) for draft in drafts):
            raise TypeError(f"chain() takes one list of tokens for each of the {self.batch_size} rows, got {drafts!r}")
        cut = [list(draft)[: self.budget[b]] if self.active[b] else [] for b, draft in enumerate(drafts)]
        if any(int(token) != token for draft in cut for token in draft):
            raise TypeError(f"chain() takes integer token ids, got {drafts!r}")
        if any(not 0 <= token < self.vocab_size for draft in cut for token in draft):
            raise ValueError(f"drafted a token outside of the target's vocabulary of {self.vocab_size}")
        longest = max(map(len, cut), default=0)
        if longest == 0:
            return DraftTree.root_only(self.root)
        padded = uploaded([[len(draft), *draft, *[0] * (longest - len(draft))] for draft in cut], self.tokens.device)
        return DraftTree.from_chain(self.root, padded[:, 1:], padded[:, 0])


class Proposer(ABC):
    """Base class of proposers: drafts tokens for the target to verify.

    The output does not depend on the proposer, as long as each draft states how it was made. A draft is either chosen
    deterministically (`DraftTree.probs` is None), or drawn from a distribution q, given as `DraftTree.probs`. Whether
    a token is drafted may depend on q, never on the token that was drawn.

    Each `generate()` call drafts with a shallow copy of the proposer. Attributes set in `begin` and later belong to
    this call alone. Attributes set in `__init__` are shared between calls, also in other threads.

    Example:
        ```python
        class RepeatProposer(Proposer):
            def propose(self, context: Context) -> DraftTree:
                return context.chain([[token] * 4 for token in context.root.tolist()])

        spec = SpeculativeGenerator(model, RepeatProposer())
        ```
    """

    paces_itself = False  # True if `propose` asks `context.pacer` how far to draft

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "follow" in vars(cls) and "sync" not in vars(cls):
            warnings.warn(
                f"{cls.__name__}.follow: Proposer.follow is now Proposer.sync", DeprecationWarning, stacklevel=2
            )
            cls.sync = cls.follow  # type: ignore[attr-defined, method-assign]

    def taps(self, target: PreTrainedModel) -> Taps | None:
        """The target's hidden states that this proposer reads as `Context.features`. None: it reads none."""
        return None

    def check(self, target: PreTrainedModel) -> None:
        """Check that this proposer can draft for `target`. Called once, when the generator is constructed.

        Raises:
            ValueError: it cannot.
        """

    def begin(self, context: Context) -> None:
        """Prepare for a `generate()` call. Called on the call's own copy; `context` holds the prompts."""

    def drafting_model(self) -> nn.Module | None:
        """The model whose passes make the drafts, if there is one. Called after `check`.

        Costs measured by earlier processes are looked up by the shape of this model.
        """
        return None

    def capture(self, compiled: bool) -> None:
        """Allow passes to be captured as CUDA graphs from now on. Called after `check`.

        Args:
            compiled: True to run captured passes through `torch.compile`, see `StaticForward`.
        """

    @property
    def drafted_by(self) -> str:
        """Name of the proposer that made the last draft, for the report."""
        return type(self).__name__

    @abstractmethod
    def propose(self, context: Context) -> DraftTree:
        """Draft continuations of the rows.

        Args:
            context: the state of the batch.

        Returns:
            One tree per row. `DraftTree.root_only(context.root)` drafts nothing.
        """

    def paced_draft(self, context: Context) -> DraftTree:
        """Return the draft of `propose`, limited in depth if the proposer leaves that to its caller.

        Without a fixed `draft_length`, tokens of a chain are cut that are not expected to pay, by how often past
        drafts were accepted at their depth.
        """
        pacer = context.pacer
        if self.paces_itself:
            return self.propose(context)
        draft = DraftTree.root_only(context.root) if pacer.length == 0 else self.propose(context)
        if not isinstance(draft, DraftTree) or draft.size <= 1:
            return draft
        if pacer.length is not None:
            return draft.up_to_depth(pacer.length)
        if not draft.chain or draft.confidence_bins is not None:  # trees are verified as they are
            return draft
        rows = max(1, len(context.rows))
        gains, chance = [], float(rows)
        for depth in range(1, draft.size):
            chance *= pacer.acceptance.rate(depth, like=pacer.expected_rate)
            gains.append(chance)
        draft = draft.up_to_depth(pacer.best_length(gains, rows))
        return draft if draft.size == 1 else replace(draft, confidence_bins=draft.depth)

    def sync(self, context: Context) -> None:
        """Keep up with a round in which another proposer drafts (see `HybridProposer`).

        Store `context.fresh` and `context.features` if they are needed: the next context holds only later ones. The
        text stays available. `observe` is not called for such a round.
        """

    def draft_ahead(self, context: Context, new_tokens: NewTokens) -> None:
        """Called while the device verifies this round's draft.

        A proposer whose next draft depends on device tensors only may launch it now; the next `propose` returns it.

        Args:
            context: the state of the batch in this round.
            new_tokens: the tokens that each row gets in this round, on the device.
        """

    def observe(self, draft: DraftTree, verdict: Verdict, accepted: Sequence[int]) -> None:
        """Process the result of a round in which this proposer drafted.

        Args:
            draft: the draft that was verified.
            verdict: the result. `verdict.outcome` holds it on the host, with the draft's notes, so that no host sync
                is needed. `verdict.outcome.tokens[b]` are the tokens that the text of row b got in this round; none
                follows its end. A row that is ahead of the others may still be cut back later, see `end`.
            accepted: B ints, the number of drafted tokens that were accepted in each row.
        """

    def end(self, context: Context) -> None:
        """Finish a `generate()` call that ran to its end. Called once, after the last `observe`.

        A proposer with a memory stores the texts here. The default does nothing.

        Args:
            context: the final state of the batch: `context.row(b)` is the whole text of row b.
        """
