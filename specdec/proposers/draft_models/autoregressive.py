"""`AutoregressiveProposer`: drafts by a model of its own, one pass per depth: a chain, a fixed or a dynamic tree.

Owns the shapes of drafts and when to stop. The models, and how they keep up with the text, are its subclasses'.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import TypeVar

import torch
from torch import Tensor

from specdec.proposers.base import Context, Proposer
from specdec.proposers.draft_models import acceptance_estimates
from specdec.proposers.draft_models.acceptance_estimates import TreeGains
from specdec.proposers.draft_models.draft_nodes import Stepped
from specdec.proposers.draft_models.fixed_tree import draw_without_replacement, fitted, top
from specdec.proposers.pacing.pacer import Pacer
from specdec.sampling.acceptance import sample
from specdec.sampling.draft_tree import DraftTree
from specdec.sampling.dynamic_tree import Candidates, DynamicTree, Ranking
from specdec.sampling.results import Outcome, Verdict
from specdec.utils.device_copies import uploaded
from specdec.utils.timing import clock

Read = TypeVar("Read")
Same = TypeVar("Same", bound="AutoregressiveProposer")


class AutoregressiveProposer(Proposer):
    """Drafts by running a model step by step.

    Drafts are made of top tokens: at T = 0 of the draft's own distribution q (temperature, top-k, penalties applied),
    at T > 0 of the race that q and the target share the noise of (`Context.coupled_scores`). Under the rules "block" and "token"
    chains and fixed trees are drawn from q instead, if `draw`. Drafting ends where the next pass is not worth its cost
    (see `Pacer`).

    Args:
        branching: children per node at each depth, (3, 2, 1) say, for a tree of that shape.
        tree: for a dynamic one. Without either: chains.
        draw: at T > 0 under the rules "block" and "token", draw the draft from q.
    """

    def __init__(self, *, branching: Sequence[int] | None = None, tree: DynamicTree | None = None, draw: bool = True):
        if branching is not None and (not branching or any(not isinstance(n, int) or n < 1 for n in branching)):
            raise ValueError(f"branching needs at least one child at every depth, (3, 2, 1) say, got {branching!r}")
        if branching is not None and tree is not None:
            raise ValueError("branching is the shape of a fixed tree, tree of a dynamic one: give one of them")
        self.branching, self.tree, self.draw = branching, tree, draw
        self._stepped = 0  # nodes of the last draft, in their order behind the root, that the model was run over
        self._pacer: Pacer | None = None
        self._rows: list[int] = []  # that the last draft was for

    def shaped(self: Same, *, branching: Sequence[int] | None = None, tree: DynamicTree | None = None) -> Same:
        """The same model with drafts of another shape, for calls of their own: what it has read is shared."""
        other = copy.copy(self)
        other.branching, other.tree = branching, tree
        return other

    # What a draft model does

    @abstractmethod
    def _backlog(self, context: Context) -> int:
        """Tokens that `_catch_up` would have to read, over all rows and with their padding."""

    @abstractmethod
    def _catch_up(self, context: Context) -> Tensor:
        """Take in what the text gained since the last draft, the root included; logits after it, (B, 1, K)."""

    @abstractmethod
    def _step(self, stepped: Stepped, n: int, parents: Tensor | None, chain: bool) -> Tensor:
        """Run the model over the last n of `stepped`, the others being pending; logits (B, n, K)."""

    @abstractmethod
    def _full(self, logits: Tensor, vocab_size: int) -> Tensor:
        """Logits (..., K) over the target's vocabulary (..., V): what the draft does not know gets -inf."""

    def known_tokens(self) -> Tensor | None:
        """(K,) int64, the target's ids that the draft can propose; None: all."""
        return None

    def _deepest(self, pacer: Pacer) -> int:
        """How deep a draft may go."""
        return pacer.limit

    # Drafting

    def begin(self, context: Context) -> None:
        super().begin(context)
        self._gains = TreeGains()

    def propose(self, context: Context) -> DraftTree:
        pacer = self._pacer = context.pacer
        limit = min(self._deepest(pacer), max((context.budget[b] for b in context.rows), default=0))
        self._stepped, self._rows = 0, context.rows
        chances, left = acceptance_estimates.chances(context, pacer.expected_rate), max(context.budget)
        if limit == 0 or not pacer.may_start(chances, 1, backlog=self._backlog(context), tokens_left=left):
            return DraftTree.root_only(context.root)
        return self._draft(context, limit)

    def _draft(self, context: Context, limit: int) -> DraftTree:
        return self._grown(context, self._catch_up(context), limit)

    def _grown(self, context: Context, logits: Tensor, limit: int) -> DraftTree:
        """The draft behind the roots, from the logits (B, 1, K) after them."""
        if self._in_chains(context):
            return self._grow_chain(context, logits, limit)
        if self.branching is not None:
            return self._grow_fixed(context, logits, min(limit, len(self.branching)), self.branching)
        assert self.tree is not None
        return self._grow_dynamic(context, logits, min(limit, self.tree.depth), self.tree)

    def _in_chains(self, context: Context) -> bool:
        return context.chains_only or (self.branching is None and self.tree is None)

    def observe(self, draft: DraftTree, verdict: Verdict, accepted: Sequence[int]) -> None:
        """Book which nodes of a dynamic tree were accepted, and how deep it went; of a chain what was not looked at."""
        outcome, pacer = verdict.outcome, self._pacer
        if outcome is None or pacer is None:
            return
        looked = draft.tokens.device.type == "cpu"
        if "chances" in outcome.notes:
            acceptance_estimates.book_tree(pacer, outcome, accepted, self._rows)
            if not looked:
                self._gains.observe(pacer, outcome.notes["chances"], self._rows)
        elif outcome.confidence_bins is not None and not looked and self._rows:
            acceptance_estimates.record_chain(pacer, outcome.confidence_bins, draft.size, self._rows)

    def _accepted_steps(self, outcome: Outcome, accepted: Sequence[int]) -> list[list[int]]:
        """For each row, which of the draft model's steps of this round the accepted nodes were, as far as they were.

        Nodes of the last depth were not: accepted or not, the next catch-up feeds them.
        """
        steps = []
        for b, count in enumerate(accepted):
            path = outcome.path[b][1 : count + 1]
            if "steps" in outcome.notes:
                known = [outcome.notes["steps"][b][node] for node in path]
            else:
                known = [node - 1 if node <= self._stepped else -1 for node in path]
            steps.append(list(takewhile(lambda step: step >= 0, known)))
        return steps

    def _draws(self, context: Context) -> bool:
        """Tokens are drawn from q; where the text follows shared noise, the race's best is the better bet."""
        return context.sampling and self.draw and context.noise is None

    def _grow_chain(self, context: Context, logits: Tensor, limit: int) -> DraftTree:
        pacer = context.pacer
        draw = self._draws(context)
        stepped = Stepped.none(context.root, context.short_budget(limit))
        drafts: list[Tensor] = []
        probs: list[Tensor] = []
        confidence_bins: list[Tensor] = []
        chances = acceptance_estimates.chances(context, 1.0)

        def read(logits: Tensor) -> tuple[Tensor, Tensor | None]:
            scores = self._processed(context, logits, stepped, 1)[:, 0]  # (B, V)
            return scores, scores.softmax(-1) if draw else None

        scores, q = read(logits)
        while True:
            if pacer.length is None:
                confidence_bins.append(self._confidence(scores, q))
                chances = acceptance_estimates.along_chain(context, chances, confidence_bins[-1], len(drafts))
            if not pacer.worth(chances, len(drafts)):
                break
            token = sample(q) if q is not None else scores.max(-1).indices  # (B,)
            drafts.append(token)
            if q is not None:
                probs.append(q)
            onward = [chance * pacer.expected_rate for chance in chances]
            if len(drafts) >= limit or not pacer.worth(onward, len(drafts), draft_steps=1):
                break
            stepped = stepped.and_then(token[:, None], None)
            scores, q = self._step_and(read, context, stepped, 1, None, chain=True)
        if not drafts:
            return DraftTree.root_only(context.root)
        self._stepped = stepped.levels
        return DraftTree.from_chain(
            context.root,
            torch.stack(drafts, 1),
            context.short_budget(len(drafts)),
            probs=torch.stack(probs, 1) if probs else None,
            confidence_bins=torch.stack(confidence_bins[: len(drafts)], 1) if confidence_bins else None,
        )

    def _confidence(self, scores: Tensor, q: Tensor | None) -> Tensor:
        """(B,) int64, see `expected.sureness`."""
        return acceptance_estimates.sureness(scores, q)

    def _grow_fixed(self, context: Context, logits: Tensor, limit: int, branching: Sequence[int]) -> DraftTree:
        """The same shape in every row, whatever is drawn: the shape must not depend on the tokens."""
        B, device = context.batch_size, context.tokens.device
        draw = self._draws(context)
        tokens, parents, depth = context.root[:, None], [-1], [0]
        stepped = Stepped.none(context.root, context.short_budget(limit))
        q_rows: list[Tensor] = []
        level = [0]  # node indices whose logits we have

        def read(logits: Tensor) -> tuple[Tensor, Tensor]:
            probs = self._processed(context, logits, stepped, len(level)).softmax(-1)  # (B, n, V)
            width = branching[depth[-1]]
            return probs, draw_without_replacement(probs, width) if draw else top(probs, width)

        probs, children = read(logits)
        for d, width in enumerate(branching[:limit], start=1):
            if draw:
                q_rows.append(probs)
            first = len(parents)
            parents += [node for node in level for _ in range(width)]
            depth += [d] * (len(level) * width)
            tokens = torch.cat([tokens, children.flatten(1)], 1)
            level = list(range(first, len(parents)))
            if d == limit:
                break
            above = None
            if d > 1:  # the root is not among the stepped nodes
                above = uploaded([parents[node] - 1 for node in level], device).expand(B, -1)
            missing = tokens[:, first:] < 0
            if above is not None and stepped.dead is not None:
                missing = missing | stepped.dead.gather(1, above - (stepped.tokens.shape[1] - stepped.dead.shape[1]))
            stepped = stepped.and_then(tokens[:, first:].clamp(min=0), above, missing)
            probs, children = self._step_and(read, context, stepped, len(level), above)
        q = None
        if q_rows:
            leaves = q_rows[0].new_zeros(B, len(level), q_rows[0].shape[-1])
            q = torch.cat([*q_rows, leaves], 1)
        self._stepped = stepped.tokens.shape[1]
        return fitted(context, tokens, parents, depth, q)

    def _grow_dynamic(self, context: Context, logits: Tensor, limit: int, tree: DynamicTree) -> DraftTree:
        """Expand the most probable nodes of each depth, then keep the most probable of all."""
        pacer = context.pacer
        stepped = Stepped.none(context.root, context.short_budget(limit))
        candidates = Candidates.of_root(*self._children(context, logits, stepped, 1, tree.top_k))
        for depth in range(1, limit):
            if not pacer.worth(acceptance_estimates.below(context, candidates, depth), depth, draft_steps=1):
                break
            frontier, above = candidates.frontier(tree.top_k)
            ruled_out = None
            if not context.processors.read_scores_alone:
                ruled_out = candidates.scores.gather(1, frontier) == float("-inf")
            stepped = stepped.and_then(candidates.tokens.gather(1, frontier), above, ruled_out)
            read = partial(self._children, context, stepped=stepped, n=frontier.shape[1], k=tree.top_k)
            children = self._step_and(read, context, stepped, frontier.shape[1], above)
            candidates = candidates.expanded(frontier, *children)
        best = candidates.ranked(tree.most_nodes - 1, context.short_budget(limit))
        size = self._size(context, tree, best.nodes.shape[1], best)
        if size == 0:
            return DraftTree.root_only(context.root)
        notes = {"chances": best.probabilities(), "steps": best.steps(size)}
        return replace(best.tree(context.root, size, levels=limit), notes=notes)

    def _children(self, context: Context, logits: Tensor, stepped: Stepped, n: int, k: int) -> tuple[Tensor, Tensor]:
        """Tokens and log-probabilities (B, n, k) of the most probable children of the n newest nodes."""
        return top_children(self._processed(context, logits, stepped, n), k)

    def _size(self, context: Context, tree: DynamicTree, count: int, best: Ranking | None = None) -> int:
        """How many of so many candidates are to be verified; best: they, where they can be looked at."""
        fixed = tree.size is not None or context.pacer.length is not None
        return count if fixed else self._gains.size(context, count, best)

    def _step_and(
        self,
        read: Callable[[Tensor], tuple[Tensor, Read]],
        context: Context,
        stepped: Stepped,
        n: int,
        parents: Tensor | None,
        *,
        chain: bool = False,
    ) -> tuple[Tensor, Read]:
        """`_step`, and what `read` makes of its logits (B, n, K); both are booked."""
        start = clock()
        logits = self._step(stepped, n, parents, chain)
        passed = clock()
        out = read(logits)
        self._book_step(context, logits, passed - start, clock() - passed)
        return out

    def _book_step(self, context: Context, logits: Tensor, seconds: float, building: float) -> None:
        """Of a step: what its logits (B, n, K) took, and what was made of them."""
        self._book_pass(context, logits, seconds, building=building)

    def _book_pass(
        self, context: Context, logits: Tensor, seconds: float, tokens: int = 1, building: float = 0.0
    ) -> None:
        """On a device that works on its own a pass is only launched by now: the round tells what it took."""
        if logits.device.type == "cpu":
            context.pacer.observe_draft_pass(seconds, tokens, building)
        else:
            context.pacer.launched_draft_pass(tokens)

    def _processed(self, context: Context, logits: Tensor, stepped: Stepped, n: int) -> Tensor:
        """The call's processors on the logits (B, n, K) of the n newest nodes (n = 1 and none stepped: the root)."""

        def texts() -> list[list[Tensor]]:
            so_far = [context.tokens[b, : context.ends[b]] for b in range(context.batch_size)]
            if stepped.tokens.shape[1] == 0:
                return [[text] for text in so_far]
            return [
                [torch.cat([text, stepped.tokens[b, seen]]) for seen in stepped.seen[b]]
                for b, text in enumerate(so_far)
            ]

        full = self._full(logits, context.vocab_size)
        try:
            scores = context.processors(full, texts, stepped.dead)
        except Exception:  # of a text that plain decoding may never write; else verification finds out
            scores = full.float()
        if context.processors.processors:
            # Where nothing that the draft knows is allowed, any token will do: it is going to be rejected.
            nothing = (scores == float("-inf")).all(-1, keepdim=True)
            scores = scores.masked_fill(nothing, 0.0)
        return context.coupled_scores(scores, stepped.levels)


def top_children(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k most probable entries of scores (..., K) and their log-probabilities, (..., k) each."""
    top = scores.topk(min(k, scores.shape[-1]), -1)
    log_probs = top.values - scores.logsumexp(-1, keepdim=True)
    return top.indices, log_probs.nan_to_num(nan=float("-inf"), neginf=float("-inf"))  # a processor gave +inf
