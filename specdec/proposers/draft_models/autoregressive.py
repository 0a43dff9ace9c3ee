"""`AutoregressiveProposer`: base class of proposers that draft with one model pass per depth.

It builds chains, fixed trees and dynamic trees, and decides when to stop. Subclasses run the model and keep it in step
with the text.
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

from specdec.proposers.context import Context
from specdec.proposers.draft_models import acceptance_estimates
from specdec.proposers.draft_models.acceptance_estimates import TreeGains, bin_of
from specdec.proposers.draft_models.cuda_graph_drafts import CapturedDraft
from specdec.proposers.draft_models.draft_nodes import DraftNodes
from specdec.proposers.draft_models.draft_scores import DraftScores, top_children
from specdec.proposers.draft_models.drafter import Drafter
from specdec.proposers.draft_models.fixed_tree import draw_without_replacement, fitted, top
from specdec.proposers.pacing.pacer import Pacer
from specdec.sampling.acceptance import sample
from specdec.sampling.draft_tree import DraftTree
from specdec.sampling.dynamic_tree import Candidates, DynamicTree, Ranking
from specdec.sampling.results import HostResult, RoundResult
from specdec.utils.device_copies import uploaded
from specdec.utils.timing import clock

Read = TypeVar("Read")
Same = TypeVar("Same", bound="AutoregressiveProposer")


class AutoregressiveProposer(Drafter):
    """Drafts by running a model step by step. Without `branching` and `tree`, drafts are chains.

    At T = 0 a draft consists of the best tokens of the draft's distribution q, after temperature, top-k and penalties.
    At T > 0 it consists of the best tokens of q / E, with the target's exponential noise E (`Context.coupled_scores`).
    Under the rules "block" and "token", chains and fixed trees are drawn from q instead, if `draw` is True. Drafting
    stops when the next pass is not worth its cost (see `Pacer`).

    Args:
        branching: the number of children per node at each depth of a fixed tree, for example (3, 2, 1).
        tree: the settings of a dynamic tree.
        draw: True to draw drafts from q at T > 0 under the rules "block" and "token".

    Raises:
        ValueError: `branching` is empty or has an entry below 1, or both `branching` and `tree` are given.
    """

    def __init__(self, *, branching: Sequence[int] | None = None, tree: DynamicTree | None = None, draw: bool = True):
        if branching is not None and (not branching or any(not isinstance(n, int) or n < 1 for n in branching)):
            raise ValueError(f"branching needs at least one child at every depth, e.g. (3, 2, 1), got {branching!r}")
        if branching is not None and tree is not None:
            raise ValueError("branching is for a fixed tree and tree for a dynamic one, got both: give one of them")
        self.branching, self.tree, self.draw = branching, tree, draw
        self._stepped = 0  # nodes of the last draft, in order after the root, that the model has processed
        self._pacer: Pacer | None = None
        self._rows: list[int] = []  # rows of the last draft

    def shaped(self: Same, *, branching: Sequence[int] | None = None, tree: DynamicTree | None = None) -> Same:
        """A shallow copy of this proposer, with the same model and another draft shape."""
        other = copy.copy(self)
        other.branching, other.tree = branching, tree
        return other

    # Implemented by subclasses

    @abstractmethod
    def _backlog(self, context: Context) -> int:
        """Number of tokens that `_catch_up` would process, over all rows, including padding."""

    @abstractmethod
    def _catch_up(self, context: Context) -> Tensor:
        """Process the new tokens since the last draft, including the root; logits (B, 1, K) after them."""

    @abstractmethod
    def _step(self, stepped: DraftNodes) -> Tensor:
        """Run the model over the n newest nodes; the others are in its cache. Returns logits (B, n, K)."""

    def known_tokens(self) -> Tensor | None:
        """The target's token ids that the draft can propose, (K,) int64. None: all."""
        return None

    # Drafting

    def begin(self, context: Context) -> None:
        super().begin(context)
        self._scores = DraftScores(self.known_tokens(), context.tokens.device)
        self._gains = TreeGains()
        self._captured = CapturedDraft()

    def _lend(self, context: Context) -> None:
        """Let the cache of a call take over the buffers of an earlier one, with which drafts are captured."""
        if context.call.recorder is not None:
            context.call.recorder.lend("draft", self.rows.cache)

    def propose(self, context: Context) -> DraftTree:
        draft = self._proposed(context)
        self._captured.forget()
        return draft

    def _proposed(self, context: Context) -> DraftTree:
        pacer = self._pacer = context.pacer
        limit = min(self.deepest(pacer), max((context.budget[b] for b in context.rows), default=0))
        self._stepped, self._rows = 0, context.rows
        chances, left = acceptance_estimates.chances(context, pacer.expected_rate), max(context.budget)
        if limit == 0 or not pacer.may_start(chances, 1, backlog=self._backlog(context), tokens_left=left):
            return DraftTree.root_only(context.root)
        draft = self._captured(self, context)
        if draft is None:
            return self.grow_draft(context, self._catch_up(context), limit)
        self._stepped = draft.size - 2  # of a chain; a tree notes its steps
        return draft

    def grow_draft(self, context: Context, logits: Tensor, limit: int) -> DraftTree:
        if self.drafts_chains(context):
            return self._grow_chain(context, logits, limit)
        if self.branching is not None:
            return self._grow_fixed(context, logits, min(limit, len(self.branching)), self.branching)
        assert self.tree is not None
        return self._grow_dynamic(context, logits, min(limit, self.tree.depth), self.tree)

    def drafts_chains(self, context: Context) -> bool:
        return context.chains_only or (self.branching is None and self.tree is None)

    def observe(self, draft: DraftTree, result: RoundResult, accepted: Sequence[int]) -> None:
        """Record which nodes of a tree were accepted, and the confidence of a chain that was drafted on a device."""
        host, pacer = result.host(), self._pacer
        if pacer is None:
            return
        on_cpu = draft.tokens.device.type == "cpu"
        if "chances" in host.notes:
            acceptance_estimates.book_tree(pacer, host, accepted, self._rows)
            if not on_cpu:
                self._gains.observe(pacer, host.notes["chances"], self._rows)
        elif host.confidence_bins is not None and not on_cpu and self._rows:
            acceptance_estimates.record_chain(pacer, host.confidence_bins, draft.size, self._rows)

    def _accepted_steps(self, result: HostResult, accepted: Sequence[int]) -> list[list[int]]:
        """The indices of each row's accepted nodes among the nodes that the draft model has processed.

        Nodes of the last depth have not been processed. If accepted, the next catch-up processes them.
        """
        steps = []
        for b, count in enumerate(accepted):
            path = result.path[b][1 : count + 1]
            if "steps" in result.notes:
                known = [result.notes["steps"][b][node] for node in path]
            else:
                known = [node - 1 if node <= self._stepped else -1 for node in path]
            steps.append(list(takewhile(lambda step: step >= 0, known)))
        return steps

    def draws_from_q(self, context: Context) -> bool:
        """Return whether to draw tokens from q. With shared noise, the best of q / E is accepted more often."""
        return context.sampling and self.draw and context.call.noise is None

    def _grow_chain(self, context: Context, logits: Tensor, limit: int) -> DraftTree:
        pacer = context.pacer
        draw = self.draws_from_q(context)
        ids = None if draw else self._scores.own_vocabulary(context)
        stepped = DraftNodes.chain(context.root, context.short_budget(limit), limit)
        drafts: list[Tensor] = []
        probs: list[Tensor] = []
        confidence: list[Tensor] = []
        chances = acceptance_estimates.chances(context, 1.0)

        def read(logits: Tensor) -> tuple[Tensor, Tensor | None]:
            scores = self._scores(context, logits, stepped, ids)[:, 0]  # (B, K)
            return scores, scores.softmax(-1) if draw else None

        scores, q = read(logits)
        while True:
            if pacer.length is None:
                confidence.append(self._confidence(scores, q))
                chances = acceptance_estimates.along_chain(context, chances, confidence[-1], len(drafts))
            if not pacer.worth(chances, len(drafts)):
                break
            token = sample(q) if q is not None else scores.max(-1).indices  # (B,)
            token = token if ids is None else ids[token]
            drafts.append(token)
            if q is not None:
                probs.append(q)
            onward = [chance * pacer.expected_rate for chance in chances]
            if len(drafts) >= limit or not pacer.worth(onward, len(drafts), draft_steps=1):
                break
            stepped = stepped.and_then(token[:, None], None)
            scores, q = self._step_and(read, context, stepped)
        if not drafts:
            return DraftTree.root_only(context.root)
        self._stepped = stepped.levels
        return DraftTree.from_chain(
            context.root,
            torch.stack(drafts, 1),
            context.short_budget(len(drafts)),
            probs=torch.stack(probs, 1) if probs else None,
            confidence_bins=bin_of(torch.stack(confidence[: len(drafts)], 1)) if confidence else None,
        )

    def _confidence(self, scores: Tensor, q: Tensor | None) -> Tensor:
        """The confidence (B,) float32 in the next token, see `acceptance_estimates.confidence`."""
        return acceptance_estimates.confidence(scores, q)

    def _grow_fixed(self, context: Context, logits: Tensor, limit: int, branching: Sequence[int]) -> DraftTree:
        """Grow a tree of the same shape in every row. The shape must not depend on the tokens drawn."""
        B, device = context.batch_size, context.tokens.device
        draw = self.draws_from_q(context)
        tokens, parents, depth = context.root[:, None], [-1], [0]
        stepped = DraftNodes.none(context.root, context.short_budget(limit))
        q_rows: list[Tensor] = []
        level = [0]  # indices of the nodes whose logits are known

        def read(logits: Tensor) -> tuple[Tensor, Tensor]:
            probs = self._scores(context, logits, stepped).softmax(-1)  # (B, n, V)
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
            probs, children = self._step_and(read, context, stepped)
        q = None
        if q_rows:
            leaves = q_rows[0].new_zeros(B, len(level), q_rows[0].shape[-1])
            q = torch.cat([*q_rows, leaves], 1)
        self._stepped = stepped.tokens.shape[1]
        return fitted(context, tokens, parents, depth, q)

    def _grow_dynamic(self, context: Context, logits: Tensor, limit: int, tree: DynamicTree) -> DraftTree:
        """Expand the most probable nodes of each depth, then keep the most probable ones of all depths (EAGLE-2)."""
        pacer = context.pacer
        stepped = DraftNodes.none(context.root, context.short_budget(limit))
        candidates = Candidates.of_root(*self._children(context, logits, stepped, tree.top_k))
        for depth in range(1, limit):
            if not pacer.worth(acceptance_estimates.below(context, candidates, depth), depth, draft_steps=1):
                break
            frontier, above = candidates.frontier(tree.top_k)
            ruled_out = None
            if not context.call.processors.read_scores_alone:
                ruled_out = candidates.scores.gather(1, frontier) == float("-inf")
            stepped = stepped.and_then(candidates.tokens.gather(1, frontier), above, ruled_out)
            read = partial(self._children, context, stepped=stepped, k=tree.top_k)
            candidates = candidates.expanded(frontier, *self._step_and(read, context, stepped))
        best = candidates.ranked(tree.most_nodes - 1, context.short_budget(limit))
        size = self.tree_size(context, tree, best.nodes.shape[1], best)
        if size == 0:
            return DraftTree.root_only(context.root)
        notes = {"chances": best.probabilities(), "steps": best.steps(size)}
        return replace(best.tree(context.root, size, levels=limit), notes=notes)

    def _children(self, context: Context, logits: Tensor, stepped: DraftNodes, k: int) -> tuple[Tensor, Tensor]:
        """Tokens and log-probabilities (B, n, k) of the most probable children of the newest nodes."""
        ids = self._scores.own_vocabulary(context)
        tokens, log_probs = top_children(self._scores(context, logits, stepped, ids), k)
        return tokens if ids is None else ids[tokens], log_probs

    def tree_size(self, context: Context, tree: DynamicTree, count: int, best: Ranking | None = None) -> int:
        """The number of candidates to verify, out of `count`. best: the candidates, if their values may be read."""
        fixed = tree.size is not None or context.pacer.length is not None
        return count if fixed else self._gains.size(context, count, best)

    def _step_and(
        self, read: Callable[[Tensor], tuple[Tensor, Read]], context: Context, stepped: DraftNodes
    ) -> tuple[Tensor, Read]:
        """Run `_step`, apply `read` to its logits (B, n, K), and record the time of both."""
        start = clock()
        logits = self._step(stepped).to(context.tokens.device)
        passed = clock()
        out = read(logits)
        self._book_step(context, logits, passed - start, clock() - passed)
        return out

    def _book_step(self, context: Context, logits: Tensor, seconds: float, building: float) -> None:
        """Record a step: the seconds for its logits (B, n, K), and those for building nodes of them."""
        self._book_pass(context, logits, seconds, building=building)

    def _book_pass(
        self, context: Context, logits: Tensor, seconds: float, tokens: int = 1, building: float = 0.0
    ) -> None:
        """Record a pass. On an asynchronous device it is only launched, and its duration is known after the round."""
        if logits.device.type == "cpu":
            context.pacer.observe_draft_pass(seconds, tokens, building)
        else:
            context.pacer.launched_draft_pass(tokens)
