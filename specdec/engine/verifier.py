"""What a round makes of the target's logits: which path of the draft is accepted, which tokens the text gains.

`SequentialVerifier` asks what plain decoding would choose after the root, then after the child that carries that token, and so on:
processors and noise are those of plain decoding, node for node. `BatchedVerifier` comes to the same by asking at all nodes
at once. `RejectionVerifier` hands the scores of all nodes to a rule of `acceptance`. Owns the order of processors, choice and
text. Knows nothing of models or of what drafted.
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
    """What a round came to.

    Attributes:
        verdict: the accepted path. outcome: the same on the host.
        kept: tokens that each row's text gained; a row keeps none behind its end token.
        moved: in the target's cache the path lies in order by now.
    """

    verdict: Verdict
    outcome: Outcome
    kept: list[int]
    moved: bool = False


Verification = Callable[[DraftTree, Output, Transcript], Verified]  # writes what is accepted into the text


class SequentialVerifier:
    """Follow the target's own choices, asked for at reached nodes alone.

    Args:
        processors: the call's own. noise: of its sampling; None at T = 0: the best token is chosen.
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
        """(B,) int64: the tokens that plain decoding chooses by processed scores (B, V) at these columns.

        node: (B,) int64, of the draft, behind which each row is.
        """
        if self.noise is None:
            # `max` takes the first of equal maxima as `argmax` does, 4x faster on bfloat16.
            return scores.max(-1).indices
        probs = scores.softmax(-1)
        race = (probs / self.noise.at(columns).to(probs.device)).max(-1)
        if race.values.device.type == "cpu" and bool((race.values.isnan() & alive).any()):
            torch.multinomial(probs[alive], 1)  # raises what plain decoding raises of such scores
        return race.indices


class _Step:
    """One walk over one draft, as far as it got.

    Attributes:
        alive: (B,) bool, rows whose next tokens are wanted. scores: processed (B, V) by depth.
        written: tokens that the text has taken on the way.
    """

    def __init__(self, walker: SequentialVerifier, draft: DraftTree, output: Output, text: Transcript):
        self.walker, self.draft, self.output, self.text = walker, draft, output, text
        self.ends = list(text.ends)
        self.rows = torch.arange(text.batch_size, device=output.logits.device)
        finished = uploaded([text.padding, text.active], self.rows.device).bool()
        self.padding, self.alive = finished[0], finished[0] | finished[1]
        self.scores: list[Tensor] = []
        self.written = 0

    def choose(self, path: Tensor, alive: Tensor) -> Tensor | None:
        """(B,) int64, the token after each row's node path[:, -1]. path: (B, d + 1) nodes from the root.

        A processor that raises does so when plain decoding calls it: as soon as the text before is settled. None: this
        is later, and the round ends before this node. At the root, rows that are ahead of the others wait for them.
        """
        while True:
            try:
                return self._chosen(path, alive & self.alive)
            except Exception:
                if path.shape[1] > 1 and self.walker.processors.known:
                    return None
                ends = [end for end, alive in zip(self.ends, self.alive.tolist(), strict=True) if alive]
                if min(ends) == max(ends):
                    raise
                self.text.hold(max(ends))
                self.alive = self.alive & uploaded([end < max(ends) for end in self.ends], self.alive.device).bool()

    def _chosen(self, path: Tensor, alive: Tensor) -> Tensor:
        text, depth = self.text, path.shape[1] - 1
        logits = self.output.logits[self.rows, path[:, -1]]  # (B, V)
        scores = self.walker.processors(logits[:, None], lambda: self._texts(path), ~self.alive[:, None])[:, 0]
        taken = _depths(path) if path.device.type == "cpu" else [depth] * len(path)  # a device is not waited for
        columns = [end - text.start + more for end, more in zip(self.ends, taken, strict=True)]
        token = self.walker.chosen_tokens(scores, columns, alive & ~self.padding, self.draft, path[:, -1])
        self.scores.append(scores)
        return torch.where(self.padding, text.filler, token)  # finished rows go on with pads

    def write(self, path: Tensor, token: Tensor) -> bool:
        """The text takes a token before processors are called again; False once plain decoding would stop."""
        self.text.record(path[:, -1:].tolist(), [0] * len(path), self.output, self.scores[-1:])
        self.text.append(token[:, None].tolist(), [1] * len(path))
        self.text.settle()
        self.written += 1
        return not self.text.done

    def _texts(self, path: Tensor) -> list[list[Tensor]]:
        """[b][0]: row b's text down to its node, in `generate()`'s layout; of finished rows with padding."""
        text, drafted, depths = self.text, self.draft.tokens.gather(1, path)[:, 1:], _depths(path)
        longest = max(end + depth for end, depth in zip(self.ends, depths, strict=True))
        return [
            [text.padded(b, longest) if over else torch.cat([text.tokens[b, : self.ends[b]], drafted[b, : depths[b]]])]
            for b, over in enumerate(text.finished)
        ]


class RejectionVerifier:
    """Process the scores of every node, and let a rule of `acceptance` decide.

    Args:
        processors: the call's own, all of them known not to follow the text with a state.
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
        return self.rule(draft, scores)

    def _up_to_failures(
        self, draft: DraftTree, output: Output, text: Transcript, error: Exception
    ) -> tuple[Verdict, Tensor]:
        """The verdict on a draft at some of whose nodes a processor raises, and the processed scores.

        Each failing node becomes a leaf. Whether it is accepted depends on the nodes before it, so the rule stays
        exact. A row that accepts it ends its round there: the node is the next round's root.

        Raises:
            Exception: `error`, if plain decoding calls the processor with the text that is settled by now. Otherwise
                the rows whose root fails wait for the rows before them.
        """
        scores, failed = _node_by_node(self.processors, draft, output, text)
        ends = [end for end, active in zip(text.ends, text.active, strict=True) if active]
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
    """`SequentialVerifier` without walking: the target's choice at every node at once, and then the path along them.

    Few operations, whatever the depth, on more numbers: for devices, where operations are what costs.

    Args:
        processors: all of them look at scores alone. noise: as for `SequentialVerifier`.
    """

    MOST = 2**28  # scores of a pass; more, and `SequentialVerifier` looks at fewer of them

    def __init__(self, processors: NodeProcessors, noise: Noise | None):
        super().__init__(processors, longest_accepted_path)
        self.noise = noise
        self._walk = SequentialVerifier(processors, noise)

    def __call__(self, draft: DraftTree, output: Output, text: Transcript) -> Verified:
        return (self._walk if output.logits.numel() > self.MOST else super()).__call__(draft, output, text)

    def verdict(self, draft: DraftTree, scores: Tensor, text: Transcript) -> Verdict:
        return self.chosen(draft, scores, self.noise_for(draft, text))

    def noise_for(self, draft: DraftTree, text: Transcript) -> Tensor | None:
        """(B, D, V), of the columns that the draft's nodes decide, by depth; None at T = 0."""
        if self.noise is None:
            return None
        return self.noise.ahead([end - text.start for end in text.ends], draft.height + 1)

    def chosen(self, draft: DraftTree, scores: Tensor, noise: Tensor | None) -> Verdict:
        """By processed scores (B, N, V)."""
        if noise is not None:
            noise = noise.to(scores.device)
            if not draft.chain:
                noise = noise.gather(1, draft.depth[..., None].expand(-1, -1, noise.shape[-1]))
            scores = scores.softmax(-1) / noise
        return self.rule(draft, scores.max(-1).indices)


def written(verdict: Verdict, outcome: Outcome, tokens: Tensor, text: Transcript, moved: bool = False) -> Verified:
    """The text takes what a round came to; tokens: the verdict's `new_tokens`."""
    kept = text.append(outcome.tokens, outcome.accepted, tokens)
    return Verified(replace(verdict, outcome=outcome), outcome, kept, moved)


def _depths(path: Tensor) -> list[int]:
    """Of the node that each row is at: behind it, its path (B, d + 1) repeats it."""
    return (path[:, 1:] != path[:, :-1]).sum(1).tolist()


def outcome_sent(draft: DraftTree, verdict: Verdict, tokens: Tensor) -> Callable[[], Outcome]:
    """Sends to the host what it wants to know of the round; what is returned waits for it: the one time in a round.

    tokens: the verdict's `new_tokens`.
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
    """Rows that go on with pads need no verdict: all of their draft is accepted, and a pad follows."""
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
    """Processed scores (B, N, V), and the nodes (B, N) bool at which a processor raises; there the scores are raw.

    Descendants of these nodes, and of tokens that were ruled out, are not processed: no path reaches them.
    """
    scores, texts = output.logits.float().clone(), _node_texts(text, draft)
    failed = torch.zeros_like(draft.tokens, dtype=torch.bool)
    reachable: list[list[bool]] = [[] for _ in texts]
    wanted = [active or padding for active, padding in zip(text.active, text.padding, strict=True)]
    for n, parents in enumerate(draft.parents.T.tolist()):
        for b, parent in enumerate(parents):
            from_parent = n == 0 or (parent >= 0 and reachable[b][parent] and not failed[b, parent])
            possible = from_parent and (n == 0 or float(scores[b, parent, draft.tokens[b, n]]) > float("-inf"))
            reachable[b].append(wanted[b] and possible)
            if not reachable[b][n]:
                continue
            columns = len(texts[b][n])
            prefixes = [
                [text.padded(row, columns) if over else texts[row][0]] for row, over in enumerate(text.finished)
            ]
            prefixes[b] = [texts[b][n]]
            others = torch.tensor([[row != b] for row in range(len(texts))])
            try:
                scores[b, n] = processors(output.logits[:, n : n + 1], lambda: prefixes, others)[b, 0]  # noqa: B023
            except Exception:
                failed[b, n] = True
    return scores, failed


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
