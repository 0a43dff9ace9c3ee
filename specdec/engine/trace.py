"""`RoundTrace`: one round of one row as plain numbers, to look at: the draft, what the target thought of it, what it took.

Owns what is kept of a round and its text. Knows nothing of the loop that made it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specdec.engine.verifier import Verified
from specdec.sampling.draft_tree import DraftTree

TOP = 5  # of the target's tokens after a node


@dataclass(frozen=True)
class RoundTrace:
    """What happened to one row in one round. Node 0 is the root, the row's last token before the round.

    Attributes:
        row: of the batch. position: new tokens that the row had before. drafted_by: the proposer's name.
        tokens: one per node. parents: the index of each node's parent, which comes before it; -1 for the root.
        chances: p of each node after its parent, by the target's logits as they are (temperature and other processors
            come later); 1.0 for the root.
        top: the target's most probable tokens after each node and their chances, the best first.
        path: the accepted nodes, from the root. next_token: what the target wrote behind them, the bonus or recovered
            token; None where the text had ended before.
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
        """Each node's distance from the root."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return depths

    @property
    def new_tokens(self) -> list[int]:
        """What the row's text gained."""
        bonus = [] if self.next_token is None else [self.next_token]
        return [self.tokens[node] for node in self.path[1:]] + bonus

    def text(self, tokenizer: Any = None) -> str:
        """The tree, a line per node: the accepted marked, each with its chance; token ids without a tokenizer."""
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
    """A token as people read it: its text with white space visible, or its id."""
    return repr(tokenizer.decode([token])) if tokenizer is not None else str(token)


def trace_rounds(
    draft: DraftTree, logits: Tensor, verified: Verified, positions: Sequence[int], rows: Sequence[int], drafted_by: str
) -> list[RoundTrace]:
    """What a batch's round was, for each of `rows`.

    Args:
        logits: (B, N, V) of the target after each node. positions: new tokens of each of the B rows before the round.
    """
    found = []
    for b in rows:
        parents = verified.outcome.parents[b]
        nodes = [0, *(node for node, parent in enumerate(parents) if parent >= 0)]  # padding left out
        place = {node: i for i, node in enumerate(nodes)} | {-1: -1}
        tokens = draft.tokens[b, nodes].tolist()
        probs = logits[b, nodes].float().softmax(-1)  # (n, V)
        best = probs.topk(min(TOP, probs.shape[-1]), -1)
        above = [place[parents[node]] for node in nodes]
        accepted, kept = verified.outcome.accepted[b], verified.kept[b]
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
                path=[place[node] for node in verified.outcome.path[b][: min(accepted, kept) + 1]],
                next_token=verified.outcome.tokens[b][-1] if kept > accepted else None,
            )
        )
    return found
