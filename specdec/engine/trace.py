"""`RoundTrace`: one round of one row as plain numbers: the draft, the target's probabilities and the accepted path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specdec.sampling.draft_tree import DraftTree
from specdec.sampling.results import HostResult, depths_of

TOP = 5  # most probable target tokens recorded per node


@dataclass(frozen=True)
class RoundTrace:
    """One round of one row: n nodes, of which node 0 is the root, the row's last token before the round.

    Get traces from `SpeculativeGenerator.watch()`.

    Attributes:
        row: index in the batch.
        position: number of new tokens of the row before the round.
        drafted_by: name of the proposer.
        tokens: (n) token id of each node.
        parents: (n) index of each node's parent, which is lower than its own; -1 for the root.
        chances: (n) target probability of each node after its parent, from raw logits (before temperature and other
            logits processors); 1.0 for the root.
        top: (n, up to 5) the target's most probable tokens after each node as (token, probability), best first.
        path: indices of the accepted nodes, starting with the root.
        next_token: the bonus or recovered token after the path; None if the text ended on the path.

    Examples:
        >>> trace = RoundTrace(0, 3, "ngram", [7, 1, 2], [-1, 0, 1], [1.0, 0.5, 0.25], [[], [], []], [0, 1], 9)
        >>> trace.new_tokens
        [1, 9]
        >>> print(trace.text())
        + 7  1.000
        +   1  0.500
        -     2  0.250
        = 9
    """

    row: int
    position: int
    drafted_by: str
    tokens: list[int]
    parents: list[int]
    chances: list[float]
    top: list[list[tuple[int, float]]]
    path: list[int]
    next_token: int | None

    @property
    def depths(self) -> list[int]:
        """Distance of each node from the root."""
        return depths_of(self.parents)

    @property
    def new_tokens(self) -> list[int]:
        """Token ids that the round added to the row's text: the accepted ones and `next_token`."""
        bonus = [] if self.next_token is None else [self.next_token]
        return [self.tokens[node] for node in self.path[1:]] + bonus

    def text(self, tokenizer: Any = None) -> str:
        """Format the tree, one line per node with its probability; accepted nodes begin with "+".

        Args:
            tokenizer: decodes tokens; None to show token ids.
        """
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(node)

        def lines(node: int, depth: int) -> list[str]:
            mark = "+" if node in self.path else "-"
            line = f"{mark} {'  ' * depth}{shown(self.tokens[node], tokenizer)}  {self.chances[node]:.3f}"
            return [line, *(line for child in children.get(node, []) for line in lines(child, depth + 1))]

        after = "" if self.next_token is None else f"\n= {shown(self.next_token, tokenizer)}"
        return "\n".join(lines(0, 0)) + after

    def __repr__(self) -> str:
        drafted = f"{len(self.tokens) - 1} drafted by {self.drafted_by}"
        return f"<RoundTrace: row {self.row} at {self.position}, {drafted}, {len(self.path) - 1} accepted>"


def shown(token: int, tokenizer: Any = None) -> str:
    """Format a token for display: its text, quoted so that white space is visible, or its id."""
    return repr(tokenizer.decode([token])) if tokenizer is not None else str(token)


def trace_rounds(
    draft: DraftTree,
    logits: Tensor,
    result: HostResult,
    kept: Sequence[int],
    positions: Sequence[int],
    rows: Sequence[int],
    drafted_by: str,
) -> list[RoundTrace]:
    """Build the traces of a round for the given rows.

    Args:
        draft: the verified draft, (B, N).
        logits: (B, N, V) target logits after each node.
        result: the result of the round.
        kept: number of tokens that the text of each of the B rows got.
        positions: number of new tokens of each of the B rows before the round.
        rows: indices of the rows to trace.
        drafted_by: name of the proposer.
    """
    found = []
    for b in rows:
        parents = result.parents[b]
        nodes = [0, *(node for node, parent in enumerate(parents) if parent >= 0)]  # padding left out
        place = {node: i for i, node in enumerate(nodes)} | {-1: -1}
        tokens = draft.tokens[b, nodes].tolist()
        probs = logits[b, nodes].float().softmax(-1)  # (n, V)
        best = probs.topk(min(TOP, probs.shape[-1]), -1)
        above = [place[parents[node]] for node in nodes]
        accepted, count = result.accepted[b], kept[b]
        found.append(
            RoundTrace(
                row=b,
                position=positions[b],
                drafted_by=drafted_by,
                tokens=tokens,
                parents=above,
                chances=[1.0, *probs[above[1:], tokens[1:]].tolist()],
                top=[
                    list(zip(ids, chances, strict=True))
                    for ids, chances in zip(best.indices.tolist(), best.values.tolist(), strict=True)
                ],
                path=[place[node] for node in result.path[b][: min(accepted, count) + 1]],
                next_token=result.tokens[b][-1] if count > accepted else None,
            )
        )
    return found
