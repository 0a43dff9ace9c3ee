"""`GrammarLookup`: drafts what a call's grammar forces, and other candidates as far as the grammar allows them."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field

from transformers import PreTrainedModel

from specdec.proposers.context import Context
from specdec.proposers.lookup.base import Candidate, Lookup, expected
from specdec.proposers.pacing.estimates import Acceptance
from specdec.proposers.pacing.pacer import LONGEST
from specdec.sampling.grammar import GrammarState
from specdec.utils.byte_pairs import BytePairs

MOST_BYTES = 4 * LONGEST  # of a forced text that is encoded
DEEPEST = 256  # tokens; the tree grows by a recursive call for each depth
# How often the target chose such a token (Qwen2.5-Coder-0.5B-Instruct, JSON of five texts, with fixed and free spaces):
# the only one allowed, 15 of 15; one within a forced text, 143 of 145; one that the row wrote before at the end of a
# forced text, 34 of 38; the last one of such a text, 18 of 23.
LIKELY = {"alone": 0.99, "within": 0.98, "usual": 0.9, "last": 0.8}


@dataclass
class Node:
    """A token that may follow.

    Attributes:
        token: the token id.
        chance: the chance that it and all tokens before it are accepted.
        kind: how it is forced, a key of LIKELY; None for a token of the other lookup.
        children: the tokens that may follow it.
    """

    token: int = -1
    chance: float = 1.0
    kind: str | None = None
    children: list[Node] = field(default_factory=list)

    def learn(self, tokens: Sequence[int], acceptance: Acceptance) -> None:
        """Record which of the forced tokens agree with the row's new tokens, drafted or not."""
        node: Node | None = self
        for token in tokens:
            for child in node.children:
                if child.kind is not None:
                    acceptance.observe(("grammar", child.kind), child.token == token)
            node = next((child for child in node.children if child.token == token), None)
            if node is None:
                return

    def candidates(self, most: int) -> list[Candidate]:
        """The `most` likeliest nodes below this one, parents before their children."""
        nodes: list[tuple[Node, Node]] = []
        waiting = [self]
        for node in waiting:
            nodes += [(child, node) for child in node.children]
            waiting += node.children
        nodes = sorted(nodes, key=lambda pair: -pair[0].chance)[:most]
        place = {id(node): i for i, (node, _) in enumerate(nodes)}
        return [(node.chance, node.token, place.get(id(parent), -1)) for node, parent in nodes]


class GrammarLookup(Lookup):
    """Drafts the tokens that a call's grammar forces, and the candidates of another lookup that it allows.

    A grammar forces a text, for example `name"`, which can be written with several tokens. It is encoded as a byte-pair
    tokenizer would. Its last token may go beyond it (`":`): the one that the row has written last is drafted. Where
    only one token is allowed, that one is drafted.

    Args:
        other: the lookup for text that is not forced; None: only forced tokens are drafted.
    """

    def __init__(self, other: Lookup | None = None):
        self.other = other
        self._encoders: list[BytePairs] = []  # one, of the target's vocabulary, once a call has needed it

    def check(self, target: PreTrainedModel) -> None:
        if self.other is not None:
            self.other.check(target)

    def begin(self, context: Context) -> None:
        if self.other is not None:
            self.other = copy(self.other)
            self.other.begin(context)
        self._roots = [Node() for _ in range(context.batch_size)]  # what may follow each row
        self._best: list[list[Candidate]] = []
        self._seen = [0] * context.batch_size  # new tokens of each row that were compared with `_roots`

    @property
    def drafted_by(self) -> str:
        return type(self).__name__

    def expect(self, context: Context) -> list[float]:
        pacer, grammar = context.pacer, context.call.grammar
        for b in context.rows:
            self._roots[b].learn(context.call.written[b][self._seen[b] :], pacer.acceptance)
            self._roots[b] = Node()
            self._seen[b] = len(context.call.written[b])
        self._best = [[] for _ in range(context.batch_size)]
        if pacer.limit == 0 or grammar is None:
            return []
        if self.other is not None:
            self.other.expect(context)
        for b in context.rows:
            state = grammar.after(b, context.call.written[b])
            if state is not None:  # else the verification is going to raise
                found = [] if self.other is None else self.other.candidates(context, b)
                _Growth(state, found, self._encoder(state), context, b).below(self._roots[b])
                self._best[b] = self._roots[b].candidates(pacer.limit)
        return expected(self._best)

    def candidates(self, context: Context, b: int) -> list[Candidate]:
        return self._best[b]

    def end(self, context: Context) -> None:
        if self.other is not None:
            self.other.end(context)

    def _encoder(self, state: GrammarState) -> BytePairs:
        vocabulary = None if self._encoders else state.vocabulary()
        if vocabulary is not None:
            self._encoders.append(BytePairs(vocabulary))
        return self._encoders[0] if self._encoders else BytePairs(())


class _Growth:
    """Grows the tree of what may follow one row.

    Args:
        state: the grammar after the row's text. It is moved, and moved back.
        found: the candidates of the other lookup.
        encoder: encodes forced text.
        context: the state of the batch.
        b: the row.
    """

    def __init__(self, state: GrammarState, found: Sequence[Candidate], encoder: BytePairs, context: Context, b: int):
        self._state, self._found, self._encoder = state, found, encoder
        self._acceptance, self._vocab_size = context.pacer.acceptance, context.vocab_size
        self._deepest = min(context.budget[b], context.pacer.limit, DEEPEST)
        self._chains_only = context.chains_only
        self._written = context.call.written[b]
        self._below: dict[int | None, list[int]] = {}  # by parent, candidates of the other lookup
        for i, (_, _, parent) in enumerate(found):
            self._below.setdefault(parent, []).append(i)

    def below(self, node: Node, source: int | None = -1, depth: int = 0) -> None:
        """Grow the tree below a node, which is candidate `source` of the other lookup (-1: the root, None: not one)."""
        if depth == self._deepest or self._state.ended:
            return
        sources = {self._found[i][1]: i for i in self._below.get(source, ())}
        before = self._found[source][0] if source is not None and source >= 0 else 1.0
        # The chance of a candidate that is very deep may be rounded to 0.
        rates = {token: self._found[i][0] / before if before else 0.0 for token, i in sources.items()}
        token, kind = self._forced()
        if kind is not None:
            rate = self._acceptance.rate(("grammar", kind), like=LIKELY[kind])
            rates = {other: (1 - rate) * chance for other, chance in rates.items()} | {token: rate}
        likeliest = sorted(rates, key=rates.__getitem__, reverse=True)
        for next_token in likeliest[:1] if self._chains_only else likeliest:
            if self._state.accept(next_token):
                child = Node(next_token, node.chance * rates[next_token], kind if next_token == token else None)
                node.children.append(child)
                self.below(child, sources.get(next_token), depth + 1)
                self._state.rollback(1)

    def _forced(self) -> tuple[int, str | None]:
        """The token that the grammar forces next, and how; (-1, None) if it leaves a choice."""
        text = self._state.forced_text()[:MOST_BYTES]
        tokens = self._encoder.encode(text)
        if len(tokens) > 1:
            return tokens[0], "within"
        allowed = self._state.allowed(self._vocab_size).nonzero()[:, 0]
        if len(allowed) == 1:
            return int(allowed), "alone"
        if not tokens:
            return -1, None
        ends = {token for token in allowed.tolist() if self._encoder.begins(token, text)}
        usual = next((token for token in reversed(self._written) if token in ends), None)
        return (tokens[0], "last") if usual is None else (usual, "usual")
