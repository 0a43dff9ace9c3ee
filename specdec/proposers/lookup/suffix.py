"""`SuffixProposer`: drafts the tokens that followed earlier occurrences of the text's end, also in earlier calls.

Suffix decoding (arXiv 2411.04975): the continuations of several occurrences form a tree, and a node is likelier the
more occurrences agree on it. Here acceptance rates are estimated from past rounds, and the tree's size from its cost.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from transformers import PreTrainedModel

from specdec.proposers.context import Context
from specdec.proposers.lookup.base import LIKELY, Candidate, Lookup, expected, kind_of, longest, new_tokens, writable
from specdec.proposers.lookup.text_memory import Match, TextMemory
from specdec.proposers.pacing.pacer import Pacer

SHARES = (0.3, 0.6, 0.99)  # upper bounds of the bins for the share of occurrences that agree on a token


@dataclass
class Node:
    """A token that followed earlier occurrences of the text's end.

    Attributes:
        token: the token id.
        length: length of the longest match that it continues.
        leads: True if it continues the longest match of all.
        among: the number of continued occurrences of its parent.
        count: the number of these occurrences that continue with this token.
        children: nodes of the tokens that followed this one, by token.
    """

    token: int
    length: int
    leads: bool
    among: int = 0
    count: int = 0
    children: dict[int, Node] = field(default_factory=dict)

    @property
    def key(self) -> Hashable:
        """The confidence bin of this node."""
        return "suffix", kind_of(self.length), bisect_left(SHARES, self.share), self.leads

    @property
    def share(self) -> float:
        """The share of occurrences that continue with this token."""
        return self.count / self.among

    @property
    def likely(self) -> float:
        """The prior probability that this token is accepted after its parent."""
        return LIKELY[kind_of(self.length)] * self.share


class SuffixProposer(Lookup):
    """Drafts the tokens that followed earlier occurrences of the text's end, in this call or in earlier ones.

    All calls, threads and generators that share the proposer, or its memory, draft from all their texts. Several
    occurrences form a tree (suffix decoding, arXiv 2411.04975).

    Args:
        memory: the texts to draft from. An empty memory by default. `TextMemory(capacity=0)` forgets the text of a
            call when the next call starts.
        chains_only: True to draft one continuation per row instead of a tree.

    Example:
        ```python
        memory = TextMemory(capacity=1_000_000)  # tokens
        spec = SpeculativeGenerator(model, SuffixProposer(memory))
        ```
    """

    def __init__(self, memory: TextMemory | None = None, *, chains_only: bool = False):
        self.memory, self.chains_only = TextMemory() if memory is None else memory, chains_only
        self._own_memory = memory is None

    def check(self, target: PreTrainedModel) -> None:
        size = target.config.get_text_config().vocab_size
        largest = max((max(text, default=0) for text in self.memory.texts()), default=0)
        # Placeholders of images may lie beyond the vocabulary.
        if largest >= size and largest >= len(target.get_input_embeddings().weight):
            if self._own_memory:  # the vocabulary has shrunk
                self.memory = TextMemory()
                return
            raise ValueError(
                f"the memory's texts contain token {largest}, but the target's vocabulary has {size} tokens: they are "
                "from another tokenizer. Use a new TextMemory()."
            )

    def begin(self, context: Context) -> None:
        rows = range(context.batch_size)
        self._numbers = [self.memory.new() for _ in rows]
        self._batch = frozenset(self._numbers)
        self._known = [0 for _ in rows]  # tokens of each row already written to the memory
        for b in rows:
            self.memory.write(self._numbers[b], context.source_text(b), self._batch)
        self._matches: list[list[Match]] = [[] for _ in rows]
        self._found = [Node(-1, 0, True) for _ in rows]  # this round's trees, by their root nodes
        self._best: list[list[Candidate]] = []

    def expect(self, context: Context) -> list[float]:
        pacer = context.pacer
        self._best = [[] for _ in range(context.batch_size)]
        if pacer.limit == 0:
            return []
        for b, tokens in new_tokens(context, self._known).items():
            self._learn(self._found[b], tokens, pacer)
            self._known[b] += len(tokens)
            self.memory.write(self._numbers[b], tokens, self._batch)
            near = [(match.text, match.end + len(tokens)) for match in self._matches[b]]
            self._matches[b] = self.memory.matches(self._numbers[b], longest(context, b), near)
            self._found[b] = _grown(self._matches[b], context.vocab_size)
            chains_only = self.chains_only or context.chains_only
            self._best[b] = _ranked(self._found[b], context.budget[b], pacer, chains_only)
        return expected(self._best)

    def candidates(self, context: Context, b: int) -> list[Candidate]:
        return self._best[b]

    def end(self, context: Context) -> None:
        for b, tokens in new_tokens(context, self._known, range(context.batch_size)).items():
            self.memory.write(self._numbers[b], tokens, self._batch)

    @staticmethod
    def _learn(node: Node, tokens: Sequence[int], pacer: Pacer) -> None:
        """Record which of the nodes found agree with the new tokens, drafted or not, down to the first mismatch."""
        for token in tokens:
            for child in node.children.values():
                pacer.acceptance.observe(child.key, child.token == token)
            if token not in node.children:
                break
            node = node.children[token]


def _grown(matches: Sequence[Match], vocab_size: int) -> Node:
    """Build one tree of the tokens that followed the matches, within the target's vocabulary. Returns its root."""
    root = Node(-1, 0, True)
    for i, match in enumerate(matches):  # longest first, so a node is created by its longest match
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


def _ranked(root: Node, budget: int, pacer: Pacer, chains_only: bool) -> list[Candidate]:
    """The nodes most likely to be accepted, best first."""
    out: list[Candidate] = []
    order = count()  # breaks ties: first in, first out
    waiting: list[tuple[float, int, float, int, int, Node]] = []

    def visit(node: Node, chance: float, rate: float | None, place: int, depth: int) -> None:
        alone = rate if len(node.children) == 1 else None  # an only child is expected to be as good as its parent
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
