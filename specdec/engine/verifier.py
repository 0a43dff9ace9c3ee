"""Verification of a draft from the target's logits: apply logits processors and decide which path is accepted.

- `SequentialVerifier` chooses as plain decoding would after the root, then after the child with the chosen token, and
  so on. Processors and noise are those of plain decoding at each node.
- `BatchedVerifier` gives the same result from choices at all nodes at once.
- `RejectionVerifier` applies a rule of `sampling.acceptance` to the scores of all nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from specdec.engine.failing_processors import node_texts, verify_up_to_failures
from specdec.engine.sequential_verifier import OnToken, SequentialVerifier
from specdec.engine.transcript import Transcript
from specdec.models.output import Output
from specdec.sampling.acceptance import longest_accepted_path
from specdec.sampling.draft_tree import DraftTree
from specdec.sampling.logits_processors import NodeProcessors, widened
from specdec.sampling.noise import Noise
from specdec.sampling.results import RoundResult

Rule = Callable[[DraftTree, Tensor], RoundResult]  # from a draft and processed scores (B, N, V)
# From a draft, the target's output over it and the text before it. Only stateful processors need the callback.
Verification = Callable[[DraftTree, Output, Transcript, OnToken], RoundResult]


class RejectionVerifier:
    """Applies an acceptance rule to the processed scores of all nodes.

    Args:
        processors: the call's logits processors, all known to be stateless.
        rule: maps the draft and processed scores (B, N, V) to a result.
    """

    def __init__(self, processors: NodeProcessors, rule: Rule):
        self.processors, self.rule = processors, rule

    def __call__(self, draft: DraftTree, output: Output, text: Transcript, on_token: OnToken) -> RoundResult:
        try:
            scores, failed = self.processors(output.logits, lambda: node_texts(text, draft)), None
        except Exception as error:
            result, scores, failed = verify_up_to_failures(
                self.processors, draft, output, text, error, lambda tree, scores: self.decide(tree, scores, text)
            )
        else:
            result = self.decide(draft, widened(scores, output.logits.shape[-1]), text)
        result = _accept_padding(result, text, failed)
        if text.records.wanted:
            rows = torch.arange(len(scores), device=scores.device)
            result = replace(result, scores=[scores[rows, node] for node in result.path.unbind(1)])
        return result

    def decide(self, draft: DraftTree, scores: Tensor, text: Transcript) -> RoundResult:
        """Apply the rule to processed scores (B, N, V)."""
        return self.rule(draft, scores)


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

    def __call__(self, draft: DraftTree, output: Output, text: Transcript, on_token: OnToken) -> RoundResult:
        return (self._sequential if output.logits.numel() > self.MOST else super()).__call__(
            draft, output, text, on_token
        )

    def decide(self, draft: DraftTree, scores: Tensor, text: Transcript) -> RoundResult:
        return self.chosen(draft, scores, self.noise_for(draft.height + 1, text))

    def noise_for(self, depths: int, text: Transcript) -> Tensor | None:
        """Exponential noise (B, D, V) of the output columns after nodes at `depths` depths, from 0; None at T = 0."""
        if self.noise is None:
            return None
        return self.noise.ahead([end - text.start for end in text.ends], depths)

    def chosen(self, draft: DraftTree, scores: Tensor, noise: Tensor | None) -> RoundResult:
        """Decide by processed scores (B, N, V) and noise (B, D, V), or None at T = 0."""
        if noise is not None:
            noise = noise.to(scores.device)
            if not draft.chain:
                noise = noise.gather(1, draft.depth[..., None].expand(-1, -1, noise.shape[-1]))
            scores = scores.softmax(-1) / noise
        return self.rule(draft, scores.max(-1).indices)


def _accept_padding(result: RoundResult, text: Transcript, failed: Tensor | None) -> RoundResult:
    """Accept the drafted padding of finished rows that continue with it, up to the first `failed` node (B, N)."""
    rows = [b for b, padding in enumerate(text.padding) if padding]
    if not rows:
        return result
    draft, accepted, next_token = result.draft, result.accepted.clone(), result.next_token.clone()
    width = max(draft.size, result.path.shape[1])
    path = torch.arange(width, device=result.path.device).repeat(len(result.path), 1)
    path[:, : result.path.shape[1]] = result.path
    for b in rows:
        path[b] = torch.arange(width, device=path.device)
        working = draft.size if failed is None else [*failed[b].tolist(), True].index(True)
        accepted[b] = max(0, min(working - 1, text.budget[b]))
        next_token[b] = text.filler
    return replace(RoundResult.of(draft, path[:, : draft.size], accepted, next_token), hold=result.hold)
