"""The speculative decoding loop: propose a draft, run one target pass, verify, commit.

A round is algorithm 1 of Leviathan et al. (arXiv 2211.17192), for B rows whose drafts may be trees. `Loop` fixes the
order of these steps; proposers, `models.runner` and `engine.verifier` implement them. Only the loop writes the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec.engine.cuda_graph_round import CapturedRound
from specdec.engine.stopwatch import Stopwatch
from specdec.engine.trace import RoundTrace, trace_rounds
from specdec.engine.transcript import Transcript
from specdec.engine.verifier import Verification
from specdec.models.cuda_graphs import Recorder
from specdec.models.output import Output
from specdec.models.runner import ModelRunner
from specdec.proposers.base import Proposer
from specdec.proposers.context import CallState, Context
from specdec.proposers.draft_check import checked
from specdec.proposers.draft_state import DraftState
from specdec.proposers.pacing.pacer import Pacer
from specdec.sampling.draft_tree import DraftTree
from specdec.sampling.grammar import GrammarRows
from specdec.sampling.logits_processors import NodeProcessors
from specdec.sampling.noise import Noise
from specdec.sampling.results import HostResult, RoundResult, features_at
from specdec.utils.device_copies import uploaded


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
        captured_round: captures whole target passes likewise; None to run them eagerly.
        grammar: the grammar that the processors follow; None if there is none.
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
    captured_round: CapturedRound | None = None
    grammar: GrammarRows | None = None

    def run(self, prefill: Output, fresh: Sequence[int], earlier: DraftState | None = None) -> Context:
        """Decode until all rows have stopped.

        Args:
            prefill: logits (B, 1, V) after the prompts, which the cache holds, and features of the tokens just read.
            fresh: number of tokens just read in each row.
            earlier: the proposer's state of the tokens that the cache held before. None if it has none.

        Returns:
            The final context.
        """
        self._values_checked = type(self.proposer).__module__.partition(".")[0] == "specdec"
        self.cache_base = [length - 1 for length in self.target.lengths]  # cache length = base + new tokens
        self._vocab_size = prefill.logits.shape[-1]
        self._fresh: Sequence[int] = fresh
        self._features = prefill.features
        self._call = self._call_state()
        self._first_token(prefill)
        self.proposer.begin(self._context())
        if earlier is not None:
            self.proposer.resume_from(earlier)
        while not self.text.done:
            self._round()
        final = self._final_context()
        self.proposer.end(final)
        if self.text.streamer is not None:
            self.text.streamer.end()
        return final

    def _first_token(self, prefill: Output) -> None:
        """Choose the token after the prompt: a round whose draft is a root, and whose target pass was the prefill."""
        text, logits = self.text, prefill.logits
        self.stopwatch.mark("prefill")
        draft = DraftTree.root_only(torch.zeros(len(logits), dtype=torch.long, device=text.tokens.device))
        text.records.prompt_hidden_states = prefill.hidden_states
        self._verify(draft, replace(prefill, hidden_states=None))
        self._settle()
        took = self.stopwatch.mark_end("accept")
        self.pacer.observe_prefill(len(logits) * max(self._fresh), took["prefill"])
        self.stopwatch.report.times_to_first_token.append(self.stopwatch.elapsed())

    def _round(self) -> None:
        """Run one round: propose, one target pass, verify, commit."""
        text, start = self.text, self.stopwatch.elapsed()
        active, before = text.active, list(text.ends)

        context = self._context()
        proposed = self._propose(context)
        draft = self._pad_finished(proposed)
        self.stopwatch.mark("draft")

        if self.captured_round is not None and not self.traces and self.captured_round.takes(draft, text):
            result, features = self._replay(draft, context), None
        else:
            draft = draft.on(text.tokens.device).after(context.root)
            output = self._target_pass(draft)
            result, features = self._verify(draft, output), output.features
        took = self.stopwatch.mark_end("accept")

        kept = self._new(before)
        if self.traces:
            self._trace(draft, output, result, kept, active, before)
        self._commit(result, kept, features)
        self._settle()
        host = result.host()
        accepted = [min(n, k) if alive else 0 for n, k, alive in zip(host.accepted, kept, active, strict=True)]
        self.pacer.observe_passes(draft.size, took["draft"], took["verify"] + took["accept"])
        self.proposer.observe(proposed, result.in_text(accepted, self._new(before, text.text_ends)), accepted)
        self._roll_back()
        self._book(proposed, host, active, accepted, start)

    def _propose(self, context: Context) -> DraftTree:
        """Ask the proposer for a draft and check it."""
        draft = self.proposer.paced_draft(context)
        draft = checked(draft, context, f"{self.proposer.drafted_by}.propose", values=not self._values_checked)
        self._values_checked |= draft.size > 1 and draft.tokens.device.type != "cpu"
        return self._within_reach(draft)

    def _target_pass(self, draft: DraftTree) -> Output:
        """Run the target over the draft."""
        output = self.target.grow(
            draft.tokens,
            self._depth(draft),
            None if draft.chain else draft.ancestors,
            chain=draft.chain,
            hidden_states=self.text.records.hidden_states is not None,
        )
        self.stopwatch.mark("verify")
        return output

    def _verify(self, draft: DraftTree, output: Output) -> RoundResult:
        """Verify the draft, and append the accepted tokens and one more to the text. This is the host sync of a round.

        Stateful processors must see the text grow: for them each token is appended before the next is chosen.
        """
        text, output = self.text, output.on(self.text.tokens.device)

        def on_token(result: RoundResult) -> bool:
            text.write(result, output)
            text.settle()
            return not text.done

        result = self.verify(draft, output, text, on_token)
        text.write(result, output)
        return result

    def _replay(self, draft: DraftTree, context: Context) -> RoundResult:
        """Run the target pass and the verification as one captured CUDA graph."""
        assert self.captured_round is not None
        result = self.captured_round(draft, self.text)
        self.stopwatch.mark("verify")
        result.send()
        self.stopwatch.mark_next()
        assert result.left_padded is not None
        self.proposer.draft_ahead(context, result.left_padded)
        self.text.write(result)  # host sync
        return result

    def _new(self, before: Sequence[int], ends: Sequence[int] | None = None) -> list[int]:
        """Number of tokens that each row's text got since it ended at `before`."""
        return [max(0, end - start) for end, start in zip(ends or self.text.ends, before, strict=True)]

    def _commit(self, result: RoundResult, kept: Sequence[int], features: Tensor | None) -> None:
        """Commit the accepted path to the target's cache, and keep its features (B, N, C) for the proposer."""
        self._fresh, path = kept, result.path
        if result.left_padded is not None:
            states = result.left_padded.states
            # Cloned, because a proposer may keep features over rounds and the next replay overwrites this buffer.
            self._features = None if states is None else states[:, -max(kept) :].clone()
            self.target.commit(kept)
            return
        in_order = all(path[:n] == list(range(n)) for path, n in zip(result.host().path, kept, strict=True))
        self.target.commit(kept, None if in_order else path)
        self._features = _along_path(features, path, kept)

    def _settle(self) -> None:
        self.text.settle()
        if self.noise is not None:
            self.noise.settle(self.text.settled - self.text.start)

    def _roll_back(self) -> None:
        """Cut the target's cache to the rows' texts, which stopping criteria may have shortened."""
        text = self.text
        ends = [base + end - text.start for base, end in zip(self.cache_base, text.ends, strict=True)]
        floors = [base + text.settled - text.start for base in self.cache_base] if text.records.wanted else None
        self.target.truncate(ends, floors)

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
            pacer=self.pacer,
            target=self.target.model,
            fresh=self._fresh,
            features=self._features,
            call=self._call,
        )

    def _call_state(self) -> CallState:
        return CallState(
            processors=self.processors,
            noise=self.noise,
            masks=self.target.masks,
            cache=self.target.cache,
            encoder_outputs=self.target.encoder_outputs,
            recorder=self.recorder,
            start=self.text.start,
            written=self.text.written,
            grammar=self.grammar,
        )

    def _final_context(self) -> Context:
        """The context with the final texts: without padding, nor tokens of rows that ran ahead of the last column."""
        text, context = self.text, self._context()
        ends = [min(end, text.settled) for end in text.text_ends]
        written = [row[: end - text.start] for row, end in zip(text.written, ends, strict=True)]
        return replace(context, ends=ends, call=replace(context.call, written=written))

    def _depth(self, draft: DraftTree) -> Tensor:
        """Return the depths (B, N) int64 at which the target runs the nodes, limited to positions that it has."""
        deepest = self.text.deepest
        if deepest is None or min(deepest) >= draft.size - 1:
            return draft.depth
        return torch.minimum(draft.depth, uploaded(deepest, draft.tokens.device)[:, None])

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

    def _trace(
        self,
        draft: DraftTree,
        output: Output,
        result: RoundResult,
        kept: Sequence[int],
        active: Sequence[bool],
        before: Sequence[int],
    ) -> None:
        """Append the round's traces. Called before the text settles, which may truncate rows."""
        positions = [end - self.text.start for end in before]
        rows = [b for b, alive in enumerate(active) if alive]
        made = trace_rounds(draft, output.logits, result.host(), kept, positions, rows, self.proposer.drafted_by)
        for traces in self.traces:
            traces += made

    def _book(
        self,
        draft: DraftTree,
        result: HostResult,
        active: Sequence[bool],
        accepted: Sequence[int],
        start: float,
    ) -> None:
        """Report the round to the pacer and the stopwatch's report."""
        report, passes = self.stopwatch.report, self.pacer.passes
        report.num_draft_passes, report.draft_pass_seconds = passes.count, passes.seconds
        rows = [b for b, alive in enumerate(active) if alive]
        if result.confidence_bins is not None:
            for b in rows:
                self.pacer.observe_confidence(result.confidence_bins[b][1 : result.deepest[b] + 1], accepted[b])
        self.stopwatch.mark_end("other")
        seconds = self.stopwatch.elapsed() - start
        if rows:  # otherwise the round wrote padding only
            self.pacer.observe_round(draft.size, len(rows), sum(accepted) + len(rows))
        report.record_round(
            [result.nodes[b] for b in rows],
            [result.deepest[b] for b in rows],
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
