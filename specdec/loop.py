"""The decoding loop: draft, one target pass, accept, commit.

Owns the order of things in a round. Knows nothing of how any of them is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.logits import NodeProcessors
from specdec.pacing import Pacer
from specdec.proposers.base import Context, Proposer
from specdec.report import Stopwatch
from specdec.runner import ModelRunner, Output
from specdec.transcript import Transcript
from specdec.tree import DraftTree, Verdict

Rule = Callable[[DraftTree, Tensor], Verdict]  # (draft, processed scores (B, N, V)) -> verdict


@dataclass
class Loop:
    """One `generate()` call over B rows.

    Args:
        target: its runner, prefilled by `run`. proposer: drafts. rule: verifies. processors: the call's own.
        text: takes the tokens and says when to stop. pacer: how far to draft. watch: books the time.
        sampling: T > 0. trees: the target can verify trees.
    """

    target: ModelRunner
    proposer: Proposer
    rule: Rule
    processors: NodeProcessors
    text: Transcript
    pacer: Pacer
    watch: Stopwatch
    sampling: bool
    trees: bool

    def run(self, prefill: Output) -> None:
        """Decode until the text is done. `prefill`: logits (B, 1, V) after the prompts, by now in the cache."""
        self.cache_base = [length - 1 for length in self.target.lengths]  # cache length = base + new tokens
        self._vocab_size = prefill.logits.shape[-1]
        self._fresh, self._features = list(self.target.lengths), prefill.features
        self._first_token(prefill)
        if not self.text.done:
            self.proposer.begin(self._context())
        while not self.text.done:
            self._round()
        if self.text.streamer is not None:
            self.text.streamer.end()

    def _round(self) -> None:
        text, start = self.text, self.watch.elapsed()

        passes, report = self.pacer.passes, self.watch.report
        count, seconds = passes.count, passes.seconds
        proposed = self._checked(self.proposer.propose(self._context()))
        draft = self._pad_finished(proposed)
        self.watch.mark("draft")
        report.num_draft_passes += passes.count - count
        report.draft_pass_seconds += passes.seconds - seconds

        output = self.target.grow(
            draft.tokens,
            draft.depth,
            draft.ancestors,
            chain=draft.chain,
            hidden_states=text.records.hidden_states is not None,
        )
        verify_seconds = self.watch.mark("verify")

        scores = self.processors(output.logits, lambda: _node_texts(text, draft))
        verdict = self._accept_padding(draft, self.rule(draft, scores))
        accepted, tokens = _to_host(draft, verdict)
        self.watch.mark("accept")

        active = text.active
        text.record(verdict.path, accepted, output.logits, scores, output.hidden_states)
        kept = text.append(tokens, accepted)
        accepted = [min(n, taken) if alive else 0 for n, taken, alive in zip(accepted, kept, active, strict=True)]
        self.target.commit(kept, None if draft.chain else verdict.path)
        self._fresh, self._features = kept, _along_path(output.features, verdict.path, kept)
        self.proposer.observe(proposed, verdict, accepted)
        text.settle()
        self.target.truncate([base + end - text.start for base, end in zip(self.cache_base, text.ends, strict=True)])
        self._book(proposed, active, accepted, verify_seconds, start)

    def _first_token(self, prefill: Output) -> None:
        """The token after the prompt: a round whose draft is a root that the prefill has already been run over."""
        text, logits = self.text, prefill.logits
        self.pacer.observe_prefill(len(logits) * max(self.target.lengths), self.watch.mark("prefill"))
        draft = DraftTree.root_only(torch.zeros(len(logits), dtype=torch.long, device=logits.device))
        scores = self.processors(logits, lambda: [[row] for row in text.tokens])
        verdict = self.rule(draft, scores)
        accepted, tokens = _to_host(draft, verdict)
        text.record(verdict.path, accepted, logits, scores, None)
        text.records.prompt_hidden_states = prefill.hidden_states
        text.append(tokens, accepted)
        text.settle()
        self.watch.mark("accept")
        self.watch.report.times_to_first_token.append(self.watch.elapsed())

    def _context(self) -> Context:
        text = self.text
        return Context(
            tokens=text.tokens,
            pads=text.pads,
            ends=text.ends,
            active=text.active,
            room=text.room,
            sampling=self.sampling,
            chains_only=not self.trees,
            vocab_size=self._vocab_size,
            processors=self.processors,
            pacer=self.pacer,
            target=self.target.model,
            fresh=self._fresh,
            features=self._features,
        )

    def _checked(self, draft: DraftTree) -> DraftTree:
        """Proposers are also others' code: say which one broke which rule, before the target trips over it."""
        B, who = self.text.batch_size, f"{type(self.proposer).__name__}.propose"
        if not isinstance(draft, DraftTree):
            raise TypeError(f"{who} must return a DraftTree, got {type(draft).__name__}")
        if len(draft.tokens) != B:
            raise ValueError(f"{who} drafted for {len(draft.tokens)} rows, the batch has {B}: every row needs its root")
        if (
            draft.tokens.device.type == "cpu"
            and not 0 <= int(draft.tokens.min()) <= int(draft.tokens.max()) < self._vocab_size
        ):
            raise ValueError(f"{who} drafted a token outside of the target's vocabulary of {self._vocab_size}")
        return draft

    def _pad_finished(self, draft: DraftTree) -> DraftTree:
        """Rows that go on with pads (their scores are wanted) draft a chain of pads, as far as the others draft."""
        rows = [b for b, padding in enumerate(self.text.padding) if padding]
        if not rows or draft.size == 1:
            return draft
        tokens, parents = draft.tokens.clone(), draft.parents.clone()
        chain = torch.arange(-1, draft.size - 1, device=parents.device)
        for b in rows:
            tokens[b, 1:] = self.text.filler
            parents[b] = torch.where(chain < self.text.room[b], chain, -1)
        return DraftTree(tokens, parents, draft.probs, draft.chain)

    def _accept_padding(self, draft: DraftTree, verdict: Verdict) -> Verdict:
        """The pads of `_pad_finished` need no verdict: all are accepted, and a pad follows."""
        rows = [b for b, padding in enumerate(self.text.padding) if padding]
        if not rows:
            return verdict
        N = draft.size
        width = max(N, verdict.path.shape[1])
        path = torch.arange(width, device=verdict.path.device).repeat(len(verdict.path), 1)
        path[:, : verdict.path.shape[1]] = verdict.path
        accepted, next_token = verdict.accepted.clone(), verdict.next_token.clone()
        for b in rows:
            path[b] = torch.arange(width)
            accepted[b] = min(N - 1, self.text.room[b])
            next_token[b] = self.text.filler
        return Verdict(path[:, :N], accepted, next_token)

    def _book(
        self, draft: DraftTree, active: Sequence[bool], accepted: Sequence[int], verify_seconds: float, start: float
    ) -> None:
        rows = [b for b, alive in enumerate(active) if alive]
        nodes = (draft.valid.sum(-1) - 1).tolist()
        depths = draft.depth.amax(-1).tolist()
        if draft.keys is not None:
            keys = draft.keys.tolist()
            for b in rows:
                self.pacer.observe_keys(keys[b][1 : depths[b] + 1], accepted[b])
        self.watch.mark("other")
        seconds = self.watch.elapsed() - start
        if self.watch.report.num_rounds:  # the first round may hold a proposer's own prefill: not what a round costs
            gained = sum(accepted) + len(rows)
            self.pacer.observe_round(draft.size, len(draft.tokens), verify_seconds, seconds, gained)
        self.watch.report.record_round(
            [nodes[b] for b in rows],
            [depths[b] for b in rows],
            [accepted[b] for b in rows],
            seconds,
            self.proposer.drafted_by,
        )


def _to_host(draft: DraftTree, verdict: Verdict) -> tuple[list[int], list[list[int]]]:
    """Accepted counts and each row's new tokens: the round's one transfer from the device."""
    packed = torch.cat([verdict.accepted[:, None], verdict.new_tokens(draft)], 1).tolist()
    accepted = [row[0] for row in packed]
    return accepted, [row[1 : 2 + n] for row, n in zip(packed, accepted, strict=True)]


def _along_path(features: Tensor | None, path: Tensor, kept: Sequence[int]) -> Tensor | None:
    """(B, W, C) of each row's first `kept` nodes on its path (B, D), padded on the left; features: (B, N, C)."""
    if features is None:
        return None
    width = max(kept)
    column = torch.arange(width, device=path.device)
    shift = torch.tensor([width - count for count in kept], device=path.device)[:, None]
    nodes = path.gather(1, (column - shift).clamp(min=0))
    return features.gather(1, nodes[..., None].expand(-1, -1, features.shape[-1]).to(features.device))


def _node_texts(text: Transcript, draft: DraftTree) -> list[list[Tensor]]:
    """[b][n]: row b's text up to and including node n, in `generate()`'s layout."""
    ancestors = draft.ancestors.tolist()
    out: list[list[Tensor]] = []
    for b, end in enumerate(text.ends):
        row = []
        for seen in ancestors[b]:
            path = [n for n, on_path in enumerate(seen) if on_path and n > 0]
            row.append(torch.cat([text.tokens[b, :end], draft.tokens[b, path]]))
        out.append(row)
    return out
