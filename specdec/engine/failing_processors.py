"""Verification when a logits processor raises at some of a draft's nodes.

Plain decoding calls a processor on each text in turn, and raises once it reaches a text that a processor refuses. A
draft may contain such texts where plain decoding never goes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from specdec.engine.transcript import Transcript
from specdec.models.output import Output
from specdec.sampling.draft_tree import DraftTree
from specdec.sampling.logits_processors import NodeProcessors, widened
from specdec.sampling.results import RoundResult


def verify_up_to_failures(
    processors: NodeProcessors,
    draft: DraftTree,
    output: Output,
    text: Transcript,
    error: Exception,
    rule: Callable[[DraftTree, Tensor], RoundResult],
) -> tuple[RoundResult, Tensor, Tensor]:
    """Verify a draft of which a processor refuses some nodes.

    Each failing node becomes a leaf. Whether it is accepted depends only on the nodes before it, so the rule stays
    exact. A row that accepts it ends its round there: the node is the root of the next round.

    Args:
        processors: the call's stateless logits processors.
        draft: the draft.
        output: the target's output over it.
        text: the text before it.
        error: the error that a processor raised.
        rule: maps the draft and processed scores (B, N, V) to a result.

    Returns:
        The result, processed scores (B, N, V), and the failing nodes (B, N) bool.

    Raises:
        Exception: plain decoding would raise it with the text settled so far. Otherwise rows whose root fails wait for
            the rows before them (`RoundResult.hold`).
    """
    scores, failed = _node_by_node(processors, draft, output, text)
    growing = text.growing
    ends = [end for end, grows in zip(text.ends, growing, strict=True) if grows]
    waiting = [text.ends[b] for b, fails in enumerate(failed[:, 0].tolist()) if fails]
    if waiting and min(waiting) <= min(ends, default=0):
        first = min(ends, default=0)
        later = [[end > first or not grows] for end, grows in zip(text.ends, growing, strict=True)]
        roots = [[text.padded(b, first) if later[b][0] else row[0]] for b, row in enumerate(node_texts(text, draft))]
        processors(output.logits[:, :1], lambda: roots, torch.tensor(later))  # raises as plain decoding does
        raise error
    below = (draft.ancestors & failed[:, None]).sum(-1) > failed
    leaves = replace(
        draft,
        parents=draft.parents.masked_fill(below, -1),
        probs=None if draft.probs is None else draft.probs.masked_fill((failed | below)[..., None], 0.0),
    )
    result = rule(leaves, scores)
    last = result.path.gather(1, result.accepted[:, None])  # (B, 1) node
    ends_early = failed.gather(1, last)[:, 0] & (result.accepted > 0)
    depth = torch.arange(result.path.shape[1], device=last.device)
    accepted = result.accepted - ends_early.long()
    path = torch.where(depth > accepted[:, None], depth, result.path)
    next_token = torch.where(ends_early, draft.tokens.gather(1, last)[:, 0], result.next_token)
    result = RoundResult.of(draft, path, accepted, next_token)
    return replace(result, hold=min(waiting) if waiting else None), scores, failed


def _node_by_node(
    processors: NodeProcessors, draft: DraftTree, output: Output, text: Transcript
) -> tuple[Tensor, Tensor]:
    """Process scores one node at a time, to find the nodes at which a processor raises.

    Descendants of such nodes, and of tokens with probability 0, are not processed: no path reaches them. Padding of
    finished rows is written whatever its probability.

    Returns:
        Processed scores (B, N, V), raw where processing failed; and the failed nodes (B, N) bool.
    """
    scores, texts = output.logits.float().clone(), node_texts(text, draft)
    failed, processed = torch.zeros((2, *draft.tokens.shape), dtype=torch.bool)
    growing, finished, padding, rows = text.growing, text.finished, text.padding, range(len(texts))
    for n, parents in enumerate(draft.parents.T.tolist()):
        for b, parent in enumerate(parents):
            possible = padding[b] or scores[b, parent, draft.tokens[b, n]] > float("-inf")
            if not growing[b] or not (n == 0 or (parent >= 0 and processed[b, parent] and possible)):
                continue
            columns = len(texts[b][n])
            prefixes = [[text.padded(row, columns) if finished[row] else texts[row][0]] for row in rows]
            prefixes[b] = [texts[b][n]]
            others = torch.tensor([[row != b] for row in rows])
            try:
                done = processors(output.logits[:, n : n + 1], lambda: prefixes, others)[b, 0]  # noqa: B023
                scores[b, n] = widened(done, scores.shape[-1])
                processed[b, n] = True
            except Exception:
                failed[b, n] = True
    return scores, failed.to(draft.tokens.device)


def node_texts(text: Transcript, draft: DraftTree) -> list[list[Tensor]]:
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
