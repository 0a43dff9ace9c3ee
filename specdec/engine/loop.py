"""The speculative decoding loop: propose a draft, run one target pass, verify, commit.

A round is algorithm 1 of Leviathan et al. (arXiv 2211.17192), for B rows whose drafts may be trees. `Loop` fixes the
order of these steps; proposers, `models.runner` and `engine.verifier` implement them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec.engine.cuda_graph_round import RecordedPass
from specdec.engine.stopwatch import Stopwatch
from specdec.engine.trace import RoundTrace, trace_rounds
from specdec.engine.transcript import Transcript
from specdec.engine.verifier import Verification, Verified
from specdec.models.cuda_graphs import Recorder
from specdec.models.output import Output
from specdec.models.runner import ModelRunner
from specdec.proposers.base import Context, Proposer
from specdec.proposers.pacing.pacer import Pacer
from specdec.sampling.draft_tree import DraftTree
from specdec.sampling.logits_processors import NodeProcessors
from specdec.sampling.noise import Noise
from specdec.sampling.results import Outcome, features_at
from specdec.utils.device_copies import HOST, uploaded


@dataclass
class Loop:
    """The decoding loop of one `generate()` call over B rows.

    Args:
        target: runner of the target, prefilled with the prompts.
        proposer: the call's own copy of the proposer.
        verify: the verification rule, from `rules.verification`.
        processors: logits processors that the draft may apply as well.
        noise: exponential noise of the call's sampling; None at T = 0 and for rejection rules.
        text: receives the new tokens and decides when to stop.
        pacer: decides how far to draft.
        stopwatch: measures the phases of each round.
        sampling: True at T > 0.
        trees: True if the target can verify trees.
        traces: lists to which every round is appended.
        recorder: captures drafts as CUDA graphs; None to launch each kernel separately.
        recorded: captures whole target passes likewise; None to run them eagerly.
    """

    target: ModelRunner
    proposer: Proposer
    verify: Verification
    processors: NodeProcessors
    noise: Noise | None
    text: Transcript
    pacer: Pacer
    stopwatch: Stopwatch
    sampling: bool
    trees: bool
    traces: Sequence[list[RoundTrace]] = ()
    recorder: Recorder | None = None
    recorded: RecordedPass | None = None

    def run(self, prefill: Output, fresh: Sequence[int]) -> None:
        """Decode until all rows have stopped.

        Args:
            prefill: logits (B, 1, V) after the prompts, which the cache holds, and features of the tokens just read.
            fresh: number of tokens just read in each row.
        """
        self._unseen = type(self.proposer).__module__.partition(".")[0] != "specdec"  # third-party, not checked yet
        self.cache_base = [length - 1 for length in self.target.lengths]  # cache length = base + new tokens
        self._vocab_size = prefill.logits.shape[-1]
        self._fresh, self._features = list(fresh), prefill.features
        self._first_token(prefill)
        self.proposer.begin(self._context())
        while not self.text.done:
            self._round()
        self.proposer.end(self._final_context())
        if self.text.streamer is not None:
            self.text.streamer.end()

    def _round(self) -> None:
        """Run one round: propose, one target pass, verify, commit."""
        text, start = self.text, self.stopwatch.elapsed()

        # Propose a draft.
        passes, report = self.pacer.passes, self.stopwatch.report
        count, seconds = passes.count, passes.seconds
        context = self._context()
        proposed = self._checked(self.proposer.paced_draft(context), context.root)
        draft = self._pad_finished(proposed)
        self.stopwatch.mark("draft")
        report.num_draft_passes += passes.count - count

        # Run one target pass over it and verify: the accepted path and one more token go into the text.
        active, before = text.active, list(text.ends)
        features, verified = self._verified(draft, proposed, context)
        took = self.stopwatch.mark_end("accept")
        verdict, outcome, kept = verified.verdict, verified.outcome, verified.kept
        accepted = [min(n, k) if alive else 0 for n, k, alive in zip(outcome.accepted, kept, active, strict=True)]
        self.pacer.observe_drafting(took["draft"])
        report.draft_pass_seconds += passes.seconds - seconds

        # Commit the accepted path to the cache, roll the rest back, and let the proposer observe the verdict.
        in_order = verified.moved or all(path[:n] == list(range(n)) for path, n in zip(outcome.path, kept, strict=True))
        self.target.commit(kept, None if in_order else verdict.path)
        self._fresh, self._features = kept, features if verified.moved else _along_path(features, verdict.path, kept)
        self._settle()
        new = [max(0, end - start) for end, start in zip(text.ends, before, strict=True)]
        in_text = replace(outcome, tokens=[row[:count] for row, count in zip(outcome.tokens, new, strict=True)])
        self.proposer.observe(proposed, replace(verdict, outcome=in_text), accepted)
        ends = [base + end - text.start for base, end in zip(self.cache_base, text.ends, strict=True)]
        floors = [base + text.settled - text.start for base in self.cache_base] if text.records.wanted else None
        self.target.truncate(ends, floors)
        self._book(proposed, outcome, active, accepted, took, start)

    def _verified(self, draft: DraftTree, proposed: DraftTree, context: Context) -> tuple[Tensor | None, Verified]:
        """Run the target over the draft and verify it.

        Returns:
            Features (B, N, C) of the draft's nodes, or after a captured pass (B, W, C) of the tokens committed; and
            the result of the verification.
        """
        text = self.text
        if self.recorded is not None and not self.traces and self.recorded.takes(draft, text):
            launched = self.recorded.launched(draft, text)
            self.stopwatch.mark("verify")
            arrived, states = launched.sent(draft, text), launched.new_tokens.states
            self.stopwatch.mark_next()
            self.proposer.draft_ahead(context, launched.new_tokens)
            verified = arrived()  # host sync
            # Cloned, because a proposer may keep features over rounds and the next replay overwrites this buffer.
            return None if states is None else states[:, -max(verified.kept) :].clone(), verified
        active = text.active
        output = self.target.grow(
            draft.tokens,
            self._depth(draft),
            draft.ancestors,
            chain=draft.chain,
            hidden_states=text.records.hidden_states is not None,
        )
        self.stopwatch.mark("verify")
        verified = self.verify(draft, output.on(text.tokens.device), text)  # host sync
        if self.traces:
            self._show(proposed, output, verified, active)
        return output.features, verified

    def _depth(self, draft: DraftTree) -> Tensor:
        """Return the depths (B, N) int64 at which the target runs the nodes, limited to positions that it has."""
        deepest = self.text.deepest
        if deepest is None or min(deepest) >= draft.size - 1:
            return draft.depth
        return torch.minimum(draft.depth, uploaded(deepest, draft.tokens.device)[:, None])

    def _first_token(self, prefill: Output) -> None:
        """Choose the token after the prompt: a round whose draft is a root, and whose target pass was the prefill."""
        text, logits = self.text, prefill.logits
        self.stopwatch.mark("prefill")
        draft = DraftTree.root_only(torch.zeros(len(logits), dtype=torch.long, device=text.tokens.device))
        text.records.prompt_hidden_states = prefill.hidden_states
        self.verify(draft, replace(prefill, hidden_states=None).on(text.tokens.device), text)
        self._settle()
        took = self.stopwatch.mark_end("accept")
        self.pacer.observe_prefill(len(logits) * max(self._fresh), took["prefill"])
        self.stopwatch.report.times_to_first_token.append(self.stopwatch.elapsed())

    def _settle(self) -> None:
        self.text.settle()
        if self.noise is not None:
            self.noise.settle(self.text.settled - self.text.start)

    def _context(self) -> Context:
        text = self.text
        return Context(
            tokens=text.padded_left,
            pads=text.pads,
            ends=text.ends,
            active=text.active,
            budget=text.budget,
            sampling=self.sampling,
            chains_only=not self.trees,
            vocab_size=self._vocab_size,
            processors=self.processors,
            noise=self.noise,
            start=self.text.start,
            pacer=self.pacer,
            target=self.target.model,
            masks=self.target.masks,
            fresh=self._fresh,
            features=self._features,
            written=text.written,
            cache=self.target.cache,
            encoder_outputs=self.target.encoder_outputs,
            recorder=self.recorder,
        )

    def _final_context(self) -> Context:
        """The context with the final texts: without tokens of rows that ran ahead of the last column."""
        text = self.text
        written = [row[: text.settled - text.start] for row in text.written]
        return replace(self._context(), ends=[min(end, text.settled) for end in text.ends], written=written)

    def _checked(self, draft: DraftTree, root: Tensor) -> DraftTree:
        """Check a draft, which may come from third-party code, and move it to the root's device.

        Node 0 is always replaced by the root (B,) int64.

        Raises:
            TypeError: not a `DraftTree`.
            ValueError: wrong batch size, dtype, token or parent. The message names the proposer.
        """
        who = f"{self.proposer.drafted_by}.propose"
        if not isinstance(draft, DraftTree):
            raise TypeError(
                f"{who} must return a DraftTree, got {type(draft).__name__}: build one with context.chain(drafts)"
            )
        B, N = draft.tokens.shape
        if len(root) != B or N == 0:
            raise ValueError(
                f"{who} returned {B} rows of {N} nodes for a batch of {len(root)} rows: each row needs at least a root"
            )
        if draft.tokens.is_floating_point() or draft.parents.is_floating_point():
            raise ValueError(
                f"{who} returned tokens of {draft.tokens.dtype} and parents of {draft.parents.dtype}: use int64"
            )
        tokens, parents = (t.to(root.device, torch.long) for t in (draft.tokens, draft.parents))
        if N == 1:
            return DraftTree.root_only(root)
        tokens = torch.cat([root[:, None], tokens[:, 1:]], 1)
        if tokens.device.type == HOST.type or self._unseen:
            self._check_nodes(tokens.to(HOST), parents.to(HOST), draft.chain, who)
            self._unseen = False
        probs = None if draft.probs is None else draft.probs.to(root.device)
        return self._within_reach(replace(draft, tokens=tokens, parents=parents, probs=probs))

    def _within_reach(self, draft: DraftTree) -> DraftTree:
        """Drop nodes beyond a row's budget, for which the target may have no position."""
        text = self.text
        if text.reach is None:
            return draft
        most = [budget for budget, alive in zip(text.budget, text.active, strict=True) if alive]
        if min(most, default=draft.size) >= draft.size - 1:
            return draft
        if draft.chain:  # a model that builds its own masks counts padding as well
            draft = draft.first(1 + max(most))
        return draft.up_to_depth(uploaded(text.budget, draft.tokens.device))

    def _check_nodes(self, tokens: Tensor, parents: Tensor, chain: bool, who: str) -> None:
        """Check the values of a draft. On a device this is a host sync: only a third-party's first draft is checked."""
        if not 0 <= int(tokens.min()) <= int(tokens.max()) < self._vocab_size:
            raise ValueError(f"{who} drafted a token outside of the target's vocabulary of {self._vocab_size}")
        node = torch.arange(tokens.shape[1])
        if bool((parents >= node).any()) or bool((parents[:, 0] != -1).any()):
            raise ValueError(f"{who} drafted a node before its parent: parents have lower indices, the root's is -1")
        orphan = (parents > 0) & (parents.gather(1, parents.clamp(min=0)) < 0)
        if bool(orphan.any()):
            raise ValueError(f"{who} drafted a node whose parent is padding (parent -1)")
        if chain and bool(((parents >= 0) & (parents != node - 1)).any()):
            raise ValueError(f"{who} set chain=True, but the parent of some node is not the node before it")

    def _pad_finished(self, draft: DraftTree) -> DraftTree:
        """Replace the drafts of finished rows whose scores are still recorded by chains of pad tokens."""
        rows = [b for b, padding in enumerate(self.text.padding) if padding]
        if not rows or draft.size == 1:
            return draft
        tokens, parents = draft.tokens.clone(), draft.parents.clone()
        chain = torch.arange(-1, draft.size - 1, device=parents.device)
        for b in rows:
            tokens[b, 1:] = self.text.filler
            parents[b] = torch.where(chain < self.text.budget[b], chain, -1)
        return replace(draft, tokens=tokens, parents=parents, levels=None)

    def _show(self, draft: DraftTree, output: Output, verified: Verified, active: Sequence[bool]) -> None:
        """Append the round's traces. Called before the text settles, which may truncate rows."""
        positions = [end - new - self.text.start for end, new in zip(self.text.ends, verified.kept, strict=True)]
        rows = [b for b, alive in enumerate(active) if alive]
        made = trace_rounds(draft, output.logits, verified, positions, rows, self.proposer.drafted_by)
        for kept in self.traces:
            kept += made

    def _book(
        self,
        draft: DraftTree,
        outcome: Outcome,
        active: Sequence[bool],
        accepted: Sequence[int],
        took: Mapping[str, float],
        start: float,
    ) -> None:
        """Report the round to the pacer and the stopwatch's report."""
        rows = [b for b, alive in enumerate(active) if alive]
        if outcome.confidence_bins is not None:
            for b in rows:
                self.pacer.observe_confidence(outcome.confidence_bins[b][1 : outcome.deepest[b] + 1], accepted[b])
        self.stopwatch.mark_end("other")
        seconds = self.stopwatch.elapsed() - start
        if rows:  # otherwise the round wrote padding only. Time in streamers and criteria ("other") is left out
            drafting, passing = took["draft"], took["verify"] + took["accept"]
            self.pacer.observe_round(draft.size, len(rows), drafting, drafting + passing, sum(accepted) + len(rows))
        self.stopwatch.report.record_round(
            [outcome.nodes[b] for b in rows],
            [outcome.deepest[b] for b in rows],
            [accepted[b] for b in rows],
            seconds,
            self.proposer.drafted_by,
        )


def _along_path(features: Tensor | None, path: Tensor, kept: Sequence[int]) -> Tensor | None:
    """Gather features (B, N, C) of each row's first `kept` path nodes, path (B, D), left-padded to (B, W, C)."""
    if features is None:
        return None
    width = max(kept)
    if min(kept) == width:
        nodes = path[:, :width]
    else:
        shift = uploaded([width - count for count in kept], path.device)[:, None]
        nodes = path.gather(1, (torch.arange(width, device=path.device) - shift).clamp(min=0))
    return features_at(features, nodes)
