"""`SuffixProposer`: drafts what followed where the text's end stood before, in this text or an earlier call's.

Suffix decoding (arXiv 2411.04975): of several places that match, the continuations form a tree whose nodes are the
likelier the more places agree. How likely, is learnt here from what was accepted; how many are drafted, by their cost.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from transformers import PreTrainedModel

from specdec.proposers.base import Context
from specdec.proposers.lookup.base import LIKELY, Lookup, kind_of, laid_out, longest, new_tokens, writable
from specdec.proposers.lookup.text_memory import Match, TextMemory
from specdec.proposers.pacing.pacer import Pacer
from specdec.sampling.draft_tree import DraftTree

SHARES = (0.3, 0.6, 0.99)  # of the places that agree


@dataclass
class Node:
    """A token that followed.

    Attributes:
        length: of the longest match that it goes on from. leads: it followed at the place with the longest of all.
        count: places where it followed, of the `among` where its parent stood.
    """

    token: int
    length: int
    leads: bool
    among: int = 0
    count: int = 0
    children: dict[int, Node] = field(default_factory=dict)

    @property
    def key(self) -> Hashable:
        """What tells its chance apart."""
        return "suffix", kind_of(self.length), bisect_left(SHARES, self.share), self.leads

    @property
    def share(self) -> float:
        """Of the places."""
        return self.count / self.among

    @property
    def likely(self) -> float:
        """Its chance, as long as nothing is known of this text."""
        return LIKELY[kind_of(self.length)] * self.share


class SuffixProposer(Lookup):
    """Remembers: every call, thread and generator that shares the proposer, or its memory, drafts from all their texts.

    Args:
        memory: of texts; an empty one by default. `TextMemory(capacity=0)` forgets a call's text with the next call.
        chains_only: one continuation per row, no trees.
    """

    def __init__(self, memory: TextMemory | None = None, *, chains_only: bool = False):
        self.memory, self.chains_only = TextMemory() if memory is None else memory, chains_only

    def check(self, target: PreTrainedModel) -> None:
        size = target.config.get_text_config().vocab_size
        largest = max((max(text, default=0) for text in self.memory.texts()), default=0)
        if largest >= size:
            raise ValueError(
                f"the remembered texts hold token {largest}, the target's vocabulary has {size}: they are of another "
                "tokenizer, begin with a new TextMemory()"
            )

    def begin(self, context: Context) -> None:
        rows = range(context.batch_size)
        self._numbers = [self.memory.new() for _ in rows]
        self._known = [0 for _ in rows]  # tokens written into the memory
        for b in context.rows:
            self.memory.write(self._numbers[b], context.source_text(b))
        self._matches: list[list[Match]] = [[] for _ in rows]
        self._found = [Node(-1, 0, True) for _ in rows]  # this round's; root nodes
        self._best: list[list[tuple[float, int, int]]] = []  # of each, best first: chance, token, place of its parent

    def expect(self, context: Context) -> list[float]:
        pacer = context.pacer
        self._best = [[] for _ in range(context.batch_size)]
        if pacer.limit == 0:
            return []
        for b, tokens in new_tokens(context, self._known).items():
            self._learn(self._found[b], tokens, pacer)
            self._known[b] += len(tokens)
            self.memory.write(self._numbers[b], tokens)
            near = [(match.text, match.end + len(tokens)) for match in self._matches[b]]
            self._matches[b] = self.memory.matches(self._numbers[b], longest(context, b), near)
            self._found[b] = _grown(self._matches[b], context.vocab_size)
            chains_only = self.chains_only or context.chains_only
            self._best[b] = _ranked(self._found[b], context.budget[b], pacer, chains_only)
        gains = [0.0] * max(map(len, self._best))
        for row in self._best:
            for i, (chance, *_) in enumerate(row):
                gains[i] += chance
        return gains

    def draft(self, context: Context, gains: Sequence[float]) -> DraftTree:
        size = context.pacer.best_length(gains, context.batch_size)
        cut = [row[:size] for row in self._best]
        return laid_out(context, [([token for _, token, _ in row], [parent for *_, parent in row]) for row in cut])

    @staticmethod
    def _learn(node: Node, tokens: Sequence[int], pacer: Pacer) -> None:
        """Book which of the tokens found were right, drafted or not, as far as the text went along with them."""
        for token in tokens:
            for child in node.children.values():
                pacer.acceptance.observe(child.key, child.token == token)
            if token not in node.children:
                break
            node = node.children[token]


def _grown(matches: Sequence[Match], vocab_size: int) -> Node:
    """What followed the matches as one tree, its root a node without a token; of what the target can write."""
    root = Node(-1, 0, True)
    for i, match in enumerate(matches):  # the longest first: whoever makes a node has its longest match
        node = root
        for depth, token in enumerate(writable(match.following, vocab_size)):
            child = node.children.setdefault(token, Node(token, match.length + depth, i == 0))
            child.count += 1
            node = child
    todo = [root]
    while todo:
        node = todo.pop()
        among = sum(child.count for child in node.children.values())
        for child in node.children.values():
            child.among = among
        todo += node.children.values()
    return root


def _ranked(root: Node, budget: int, pacer: Pacer, chains_only: bool) -> list[tuple[float, int, int]]:
    """The nodes that are likeliest to be accepted, best first: chance, token, place of the parent (-1: the root)."""
    out: list[tuple[float, int, int]] = []
    order = count()  # of equals, whoever came first
    waiting: list[tuple[float, int, float, int, int, Node]] = []

    def visit(node: Node, chance: float, rate: float | None, place: int, depth: int) -> None:
        alone = rate if len(node.children) == 1 else None  # where places agree, the next token is as good as the last
        rates = [
            (pacer.acceptance.rate(child.key, like=child.likely if alone is None else alone), child)
            for child in node.children.values()
        ]
        if chains_only:
            rates = sorted(rates, key=lambda pair: -pair[0])[:1]
        for rate, child in rates:
            heappush(waiting, (-chance * rate, next(order), rate, place, depth, child))

    visit(root, 1.0, None, -1, 1)
    while waiting and len(out) < pacer.limit:
        chance, _, rate, parent, depth, node = heappop(waiting)
        out.append((-chance, node.token, parent))
        if depth < budget:
            visit(node, -chance, rate, len(out) - 1, depth + 1)
    return out
