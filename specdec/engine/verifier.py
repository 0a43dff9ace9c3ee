"""Verification of a draft from the target's logits: apply logits processors, accept a path, append tokens to the text.

- `SequentialVerifier` chooses as plain decoding would after the root, then after the child with the chosen token, and
  so on. Processors and noise are those of plain decoding at each node.
- `BatchedVerifier` gives the same result from choices at all nodes at once.
- `RejectionVerifier` applies a rule of `sampling.acceptance` to the scores of all nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec.engine.transcript import Transcript
from specdec.models.output import Output
from specdec.sampling.acceptance import accept_sequentially, longest_accepted_path
from specdec.sampling.draft_tree import DraftTree
from specdec.sampling.logits_processors import NodeProcessors
from specdec.sampling.noise import Noise
from specdec.sampling.results import Outcome, Verdict
from specdec.utils.device_copies import sent, uploaded

Rule = Callable[[DraftTree, Tensor], Verdict]  # (draft, processed scores (B, N, V)) -> verdict


@dataclass(frozen=True)
class Verified:
    """Result of verifying a round.

    Attributes:
        verdict: the accepted paths, on the device.
        outcome: the same on the host.
        kept: number of tokens appended to each row's text, where nothing follows an end token.
        moved: True if the accepted path is contiguous in the target's cache already.
    """

    verdict: Verdict
    outcome: Outcome
    kept: list[int]
    moved: bool = False


Verification = Callable[[DraftTree, Output, Transcript], Verified]  # appends the accepted tokens to the text


class SequentialVerifier:
    """Accepts drafted tokens that equal the target's own choice, evaluating only the nodes on the accepted path.

    Args:
        processors: the call's logits processors.
        noise: exponential noise of the call's sampling; None at T = 0, where the best token is chosen.
    """

    def __init__(self, processors: NodeProcessors, noise: Noise | None):
        self.processors, self.noise = processors, noise

    def __call__(self, draft: DraftTree, output: Output, text: Transcript) -> Verified:
        step = _Step(self, draft, output, text)
        verdict = accept_sequentially(draft, step.choose, step.alive, None if self.processors.known else step.write)
        tokens, kept = verdict.new_tokens(draft), step.written
        outcome = outcome_sent(draft, verdict, tokens)()
        accepted = [n - kept for n in outcome.accepted]
        text.record([path[kept:] for path in outcome.path], accepted, output, step.scores[kept:])
        rest = text.append([row[kept:] for row in outcome.tokens], accepted, None if kept else tokens)
        return Verified(replace(verdict, outcome=outcome), outcome, [kept + more for more in rest])

    def chosen_tokens(
        self, scores: Tensor, columns: list[int], alive: Tensor, draft: DraftTree, node: Tensor
    ) -> Tensor:
        """Choose the tokens that plain decoding would choose.

        Args:
            scores: (B, V) float32, processed.
            columns: of each row, the output column that the token is for (the first new token's is 0).
            alive: (B,) bool, rows whose choice matters.
            draft: the draft being verified.
            node: (B,) int64, the node after which each row chooses.

        Returns:
            (B,) int64.
        """
        if self.noise is None:
            # `max` returns the first of equal maxima like `argmax`, and is 4x faster on bfloat16.
            return scores.max(-1).indices
        probs = scores.softmax(-1)
        perturbed = (probs / self.noise.at(columns).to(probs.device)).max(-1)
        if perturbed.values.device.type == "cpu" and bool((perturbed.values.isnan() & alive).any()):
            torch.multinomial(probs[alive], 1)  # raises the error of plain decoding for such scores
        return perturbed.indices


class _Step:
    """State of `SequentialVerifier` during one round.

    Attributes:
        alive: (B,) bool, rows that need a next token.
        scores: processed scores (B, V) by depth.
        written: number of tokens appended to the text so far (only if processors must see the text grow).
    """

    def __init__(self, verifier: SequentialVerifier, draft: DraftTree, output: Output, text: Transcript):
        self.verifier, self.draft, self.output, self.text = verifier, draft, output, text
        self.ends = list(text.ends)
        self.rows = torch.arange(text.batch_size, device=output.logits.device)
        finished = uploaded([text.padding, text.active], self.rows.device).bool()
        self.padding, self.alive = finished[0], finished[0] | finished[1]
        self.scores: list[Tensor] = []
        self.written = 0

    def choose(self, path: Tensor, alive: Tensor) -> Tensor | None:
        """Choose the token after each row's last node.

        An error of a processor is raised when plain decoding would raise it: once the text before it is settled. Until
        then the round ends before the failing node, or, at the root, rows that are ahead wait for the others.

        Args:
            path: (B, d + 1) int64, nodes from the root.
            alive: (B,) bool, rows that are still on their path.

        Returns:
            (B,) int64, or None to end the round before this node.
        """
        while True:
            try:
                return self._chosen(path, alive & self.alive)
            except Exception:
                if path.shape[1] > 1 and self.verifier.processors.known:
                    return None
                ends = [end for end, alive in zip(self.ends, self.alive.tolist(), strict=True) if alive]
                if min(ends) == max(ends):
                    raise
                self.text.hold(max(ends))
                self.alive = self.alive & uploaded([end < max(ends) for end in self.ends], self.alive.device).bool()

    def _chosen(self, path: Tensor, alive: Tensor) -> Tensor:
        text, depth = self.text, path.shape[1] - 1
        logits = self.output.logits[self.rows, path[:, -1]]  # (B, V)
        scores = self.verifier.processors(logits[:, None], lambda: self._texts(path), ~self.alive[:, None])[:, 0]
        taken = _depths(path) if path.device.type == "cpu" else [depth] * len(path)  # avoids a host sync
        columns = [end - text.start + more for end, more in zip(self.ends, taken, strict=True)]
        token = self.verifier.chosen_tokens(scores, columns, alive & ~self.padding, self.draft, path[:, -1])
        self.scores.append(scores)
        return torch.where(self.padding, text.filler, token)  # finished rows get padding

    def write(self, path: Tensor, token: Tensor) -> bool:
        """Append a token (B,) before processors run again; return False once plain decoding would stop."""
        self.text.record(path[:, -1:].tolist(), [0] * len(path), self.output, self.scores[-1:])
        self.text.append(token[:, None].tolist(), [1] * len(path))
        self.text.settle()
        self.written += 1
        return not self.text.done

    def _texts(self, path: Tensor) -> list[list[Tensor]]:
        """Text [b][0] of each row up to its node, in `generate()`'s layout; padded for finished rows."""
        text, drafted, depths = self.text, self.draft.tokens.gather(1, path)[:, 1:], _depths(path)
        longest = max(end + depth for end, depth in zip(self.ends, depths, strict=True))
        return [
            [text.padded(b, longest) if over else torch.cat([text.tokens[b, : self.ends[b]], drafted[b, : depths[b]]])]
            for b, over in enumerate(text.finished)
        ]


class RejectionVerifier:
    """Applies an acceptance rule to the processed scores of all nodes.

    Args:
        processors: the call's logits processors, all known to be stateless.
        rule: maps the draft and processed scores (B, N, V) to a verdict.
    """

    def __init__(self, processors: NodeProcessors, rule: Rule):
        self.processors, self.rule = processors, rule

    def __call__(self, draft: DraftTree, output: Output, text: Transcript) -> Verified:
        try:
            scores = self.processors(output.logits, lambda: _node_texts(text, draft))
        except Exception as error:
            verdict, scores = self._up_to_failures(draft, output, text, error)
        else:
            verdict = self.verdict(draft, scores, text)
        verdict = _accept_padding(draft, verdict, text)
        tokens = verdict.new_tokens(draft)
        outcome = outcome_sent(draft, verdict, tokens)()
        if text.records.wanted:
            rows = torch.arange(len(scores), device=scores.device)
            text.record(outcome.path, outcome.accepted, output, [scores[rows, node] for node in verdict.path.unbind(1)])
        return written(verdict, outcome, tokens, text)

    def verdict(self, draft: DraftTree, scores: Tensor, text: Transcript) -> Verdict:
        """Apply the rule to processed scores (B, N, V)."""
        return self.rule(draft, scores)

    def _up_to_failures(
        self, draft: DraftTree, output: Output, text: Transcript, error: Exception
    ) -> tuple[Verdict, Tensor]:
        """Verify a draft when a processor raises at some of its nodes.

        Each failing node becomes a leaf. Whether it is accepted depends only on the nodes before it, so the rule stays
        exact. A row that accepts it ends its round there: the node is the root of the next round.

        Returns:
            The verdict, and processed scores (B, N, V).

        Raises:
            Exception: `error`, if plain decoding would call the processor with the text settled so far. Otherwise
                rows whose root fails wait for the rows before them.
        """
        scores, failed = _node_by_node(self.processors, draft, output, text)
        ends = [end for end, grows in zip(text.ends, text.growing, strict=True) if grows]
        waiting = [text.ends[b] for b, fails in enumerate(failed[:, 0].tolist()) if fails]
        if waiting and min(waiting) <= min(ends, default=0):
            raise error
        if waiting:
            text.hold(min(waiting))
        below = (draft.ancestors & failed[:, None]).sum(-1) > failed
        leaves = replace(
            draft,
            parents=draft.parents.masked_fill(below, -1),
            probs=None if draft.probs is None else draft.probs.masked_fill((failed | below)[..., None], 0.0),
        )
        verdict = self.verdict(leaves, scores, text)
        last = verdict.path.gather(1, verdict.accepted[:, None])  # (B, 1) node
        ends_early = failed.gather(1, last)[:, 0] & (verdict.accepted > 0)
        depth = torch.arange(verdict.path.shape[1], device=last.device)
        accepted = verdict.accepted - ends_early.long()
        return Verdict(
            torch.where(depth > accepted[:, None], depth, verdict.path),
            accepted,
            torch.where(ends_early, draft.tokens.gather(1, last)[:, 0], verdict.next_token),
        ), scores


class BatchedVerifier(RejectionVerifier):
    """`SequentialVerifier` without a loop: chooses at all nodes at once, then finds the longest accepted path.

    It runs a fixed number of larger kernels at any depth, which is faster where launches dominate. Passes with more
    than `MOST` scores are left to `SequentialVerifier`, which reads fewer of them.

    Args:
        processors: logits processors that read only the scores.
        noise: as for `SequentialVerifier`.
    """

    MOST = 2**28

    def __init__(self, processors: NodeProcessors, noise: Noise | None):
        super().__init__(processors, longest_accepted_path)
        self.noise = noise
        self._sequential = SequentialVerifier(processors, noise)

    def __call__(self, draft: DraftTree, output: Output, text: Transcript) -> Verified:
        return (self._sequential if output.logits.numel() > self.MOST else super()).__call__(draft, output, text)

    def verdict(self, draft: DraftTree, scores: Tensor, text: Transcript) -> Verdict:
        return self.chosen(draft, scores, self.noise_for(draft, text))

    def noise_for(self, draft: DraftTree, text: Transcript) -> Tensor | None:
        """Exponential noise (B, D, V) of the output columns after nodes at depths 0 to D - 1; None at T = 0."""
        if self.noise is None:
            return None
        return self.noise.ahead([end - text.start for end in text.ends], draft.height + 1)

    def chosen(self, draft: DraftTree, scores: Tensor, noise: Tensor | None) -> Verdict:
        """Verdict from processed scores (B, N, V) and noise (B, D, V), or None at T = 0."""
        if noise is not None:
            noise = noise.to(scores.device)
            if not draft.chain:
                noise = noise.gather(1, draft.depth[..., None].expand(-1, -1, noise.shape[-1]))
            scores = scores.softmax(-1) / noise
        return self.rule(draft, scores.max(-1).indices)


def written(verdict: Verdict, outcome: Outcome, tokens: Tensor, text: Transcript, moved: bool = False) -> Verified:
    """Append a round's tokens to the text. `tokens` is the verdict's `new_tokens` (B, D), on the device."""
    kept = text.append(outcome.tokens, outcome.accepted, tokens)
    return Verified(replace(verdict, outcome=outcome), outcome, kept, moved)


def _depths(path: Tensor) -> list[int]:
    """Depth of each row's last node, which its path (B, d + 1) repeats once the row has stopped."""
    return (path[:, 1:] != path[:, :-1]).sum(1).tolist()


def outcome_sent(draft: DraftTree, verdict: Verdict, tokens: Tensor) -> Callable[[], Outcome]:
    """Start copying a round's verdict to the host.

    Args:
        draft: the verified draft.
        verdict: the verdict on it.
        tokens: (B, D) int64, the verdict's `new_tokens`.

    Returns:
        A function that waits for the copy and returns the outcome: the only host sync of a round.
    """
    parts = {"accepted": verdict.accepted, "tokens": tokens, "path": verdict.path, "parents": draft.parents}
    if draft.confidence_bins is not None:
        parts["confidence_bins"] = draft.confidence_bins
    arriving = sent(parts | {f"note {name}": note for name, note in draft.notes.items()})

    def outcome() -> Outcome:
        came = arriving()
        accepted = came["accepted"]
        return Outcome(
            accepted=accepted,
            tokens=[row[: 1 + count] for row, count in zip(came["tokens"], accepted, strict=True)],
            path=came["path"],
            parents=came["parents"],
            confidence_bins=came.get("confidence_bins"),
            notes={name: came[f"note {name}"] for name in draft.notes},
        )

    return outcome


def _accept_padding(draft: DraftTree, verdict: Verdict, text: Transcript) -> Verdict:
    """Accept the whole draft of finished rows that continue with padding; a pad token follows it."""
    rows = [b for b, padding in enumerate(text.padding) if padding]
    if not rows:
        return verdict
    N = draft.size
    width = max(N, verdict.path.shape[1])
    path = torch.arange(width, device=verdict.path.device).repeat(len(verdict.path), 1)
    path[:, : verdict.path.shape[1]] = verdict.path
    accepted, next_token = verdict.accepted.clone(), verdict.next_token.clone()
    for b in rows:
        path[b] = torch.arange(width, device=path.device)
        accepted[b] = min(N - 1, text.budget[b])
        next_token[b] = text.filler
    return Verdict(path[:, :N], accepted, next_token)


def _node_by_node(
    processors: NodeProcessors, draft: DraftTree, output: Output, text: Transcript
) -> tuple[Tensor, Tensor]:
    """Process scores one node at a time, to find the nodes at which a processor raises.

    Descendants of such nodes, and of tokens with probability 0, are not processed: no path reaches them.

    Returns:
        Processed scores (B, N, V), raw where processing failed; and the failed nodes (B, N) bool.
    """
    scores, texts = output.logits.float().clone(), _node_texts(text, draft)
    failed, processed = torch.zeros((2, *draft.tokens.shape), dtype=torch.bool)
    growing, finished, rows = text.growing, text.finished, range(len(texts))
    for n, parents in enumerate(draft.parents.T.tolist()):
        for b, parent in enumerate(parents):
            below = parent >= 0 and processed[b, parent] and scores[b, parent, draft.tokens[b, n]] > float("-inf")
            if not growing[b] or not (n == 0 or below):
                continue
            columns = len(texts[b][n])
            prefixes = [[text.padded(row, columns) if finished[row] else texts[row][0]] for row in rows]
            prefixes[b] = [texts[b][n]]
            others = torch.tensor([[row != b] for row in rows])
            try:
                scores[b, n] = processors(output.logits[:, n : n + 1], lambda: prefixes, others)[b, 0]  # noqa: B023
                processed[b, n] = True
            except Exception:
                failed[b, n] = True
    return scores, failed.to(draft.tokens.device)


def _node_texts(text: Transcript, draft: DraftTree) -> list[list[Tensor]]:
    """Text [b][n] of row b up to and including node n, in `generate()`'s layout."""
    ancestors = draft.ancestors.tolist()
    out: list[list[Tensor]] = []
    for b, end in enumerate(text.ends):
        row = []
        for seen in ancestors[b]:
            path = [n for n, on_path in enumerate(seen) if on_path and n > 0]
            row.append(torch.cat([text.tokens[b, :end], draft.tokens[b, path]]))
        out.append(row)
    return out
