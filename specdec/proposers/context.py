"""`Context`: the state of a batch between two rounds, as a proposer sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.models.cache.kv_cache import SpeculativeCache
from specdec.models.cuda_graphs import Recorder
from specdec.models.encoder import EncoderOutputs
from specdec.proposers.pacing.pacer import Pacer
from specdec.sampling.draft_tree import DraftTree
from specdec.sampling.grammar import GrammarRows
from specdec.sampling.logits_processors import NodeProcessors
from specdec.sampling.noise import Noise
from specdec.utils.device_copies import HOST, uploaded
from specdec.utils.moved import warn_of_old_name

# Gumbel scale of the target's log p around the draft's log q: 0.8 for a 0.5B draft of a 1.5B target, 1.0 for a head
# (benchmarks/results/coupling.md).
SPREAD = 0.8
LARGEST_PADDING = 1024  # vocabularies whose sizes differ by more are treated as different ones


@dataclass(frozen=True)
class CallState:
    """State of a `generate()` call that the engine shares with the library's own proposers.

    Attributes:
        processors: the call's logits processors, which bring q closer to p.
        noise: the noise that the call samples with, if the rule shares it with drafts (see `Context.coupled_scores`).
        masks: the form in which the target takes an attention mask, see `ModelRunner`.
        cache: the target's cache, which holds each row except its root. None if the caller provides none.
        encoder_outputs: the encoder outputs of an encoder-decoder target.
        recorder: captures and replays drafts as CUDA graphs. None if drafts run eagerly.
        start: the column of the first new token.
        written: the new tokens of each row on the host (see `Context.recent`).
        grammar: the grammar that the call's processors follow; None if there is none.
        device_budget: (B,) int64, `Context.budget` on the device, 0 for finished rows. Set while a draft is captured,
            since a replay may have another budget.
    """

    processors: NodeProcessors = field(default_factory=lambda: NodeProcessors([]))
    noise: Noise | None = None
    masks: str | None = None
    cache: SpeculativeCache | None = None
    encoder_outputs: EncoderOutputs | None = None
    recorder: Recorder | None = None
    start: int = 0
    written: Sequence[Sequence[int]] = ()
    grammar: GrammarRows | None = None
    device_budget: Tensor | None = None


@dataclass(frozen=True)
class Context:
    """The state of a batch between two rounds, as a proposer sees it.

    Attributes:
        tokens: (B, T) int64, the text so far in `generate()`'s layout: left padding, prompt, generated tokens. Reading
            its values may need a host sync, see `recent`.
        pads: B ints, left padding of each row.
        ends: B ints, the column after each row's last token. This last token is the row's root.
        active: B bools, False for finished rows. Drafts for them are ignored.
        budget: B ints, the largest number of tokens to draft for each row.
        sampling: False at T = 0, where a draft should be the most probable token instead of a drawn one.
        chains_only: True if the target cannot verify trees.
        vocab_size: V, the width of the target's logits.
        pacer: decides how far to draft.
        target: the target model. Heads borrow its embedding.
        fresh: B ints, tokens that the target has processed since the last context: the new ones except the root.
        features: (B, W, C), the target's hidden states at the `fresh` tokens (see `Proposer.taps`), left-padded. None
            for a proposer without taps.
        call: state of the call for the library's own proposers.

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
    pacer: Pacer
    target: PreTrainedModel | None = None
    fresh: Sequence[int] = ()
    features: Tensor | None = None
    call: CallState = field(default_factory=CallState)

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
        if self.call.noise is None:
            return scores
        noise = self.call.noise.at([end - self.call.start + depth for end in self.ends])  # (B, V)
        noise = noise if ids is None else noise[:, ids.to(noise.device)]
        return (scores - noise[:, None].to(scores.device).clamp(min=1e-30).log()) / SPREAD

    def __getattr__(self, name: str) -> Any:
        new = "budget" if name == "room" else f"call.{name}" if name in CallState.__dataclass_fields__ else None
        if new is None:
            raise AttributeError(f"Context has no attribute {name!r}")
        warn_of_old_name(f"Context.{name}", f"Context.{new}")
        return attrgetter(new)(self)

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
    def host_roots(self) -> list[int] | None:
        """`root` on the host, without a host sync; None before every row has a new token."""
        written = self.call.written
        return [row[-1] for row in written] if written and all(written) else None

    @property
    def drafting_budget(self) -> list[int]:
        """The `budget` of each row, 0 for finished rows."""
        return [budget if active else 0 for budget, active in zip(self.budget, self.active, strict=True)]

    def short_budget(self, depth: int) -> Tensor | None:
        """(B,) int64, `drafting_budget` on the device. None if every row has a budget of at least `depth` tokens."""
        if self.call.device_budget is not None:
            return self.call.device_budget
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
        new = self.call.written[b] if self.call.written else ()
        return list(new[len(new) - count :]) if count <= len(new) else self.row(b)[-count:].tolist()

    def source_text(self, b: int) -> list[int]:
        """The encoder's input for row b, without tokens outside the target's vocabulary; [] without an encoder."""
        text = [] if self.call.encoder_outputs is None else self.call.encoder_outputs.text(b)
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
        if outside := [token for draft in cut for token in draft if not 0 <= token < self.vocab_size]:
            raise ValueError(
                f"chain() got a token outside of the target's vocabulary of {self.vocab_size}: {outside[0]}"
            )
        longest = max(map(len, cut), default=0)
        if longest == 0:
            return DraftTree.root_only(self.root)
        roots = self.host_roots
        if roots is None or self.call.recorder is None:
            padded = uploaded(
                [[len(draft), *draft, *[0] * (longest - len(draft))] for draft in cut], self.tokens.device
            )
            return DraftTree.from_chain(self.root, padded[:, 1:], padded[:, 0])
        # Captured rounds take drafts from the host, and copy all of their inputs to the device at once.
        tokens = [[root, *draft, *[0] * (longest - len(draft))] for root, draft in zip(roots, cut, strict=True)]
        parents = [[*range(-1, len(draft)), *[-1] * (longest - len(draft))] for draft in cut]
        nodes = torch.tensor([tokens, parents], dtype=torch.long, device=HOST)
        return DraftTree(nodes[0], nodes[1], chain=True)
