"""The verification rules a second time, slow and readable, to be checked against the papers with a finger on the line.

Plain Python floats and loops, one row at a time. A rule asks `chance` for everything that is random, so one text of a
rule can be played once with given luck or through all of its outcomes (`outcomes`): the exact distribution of what it
decides. Imports nothing from specdec.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Dist = list[float]


@dataclass(frozen=True)
class Tree:
    """One row's draft. Node 0 is the root, `parents[n]` stands before n, padding has parent -1.

    q[n] is what the children of node n were drawn from, in index order and without replacement.
    """

    tokens: list[int]
    parents: list[int]
    q: list[Dist] | None = None

    def children(self, node: int) -> list[int]:
        return [n for n, parent in enumerate(self.parents) if parent == node]

    def path(self, node: int) -> list[int]:
        """Nodes from the root down to `node`, both included."""
        return [*self.path(self.parents[node]), node] if node else [0]

    def depth(self, node: int) -> int:
        return len(self.path(node)) - 1

    @property
    def nodes(self) -> list[int]:
        """All nodes that are no padding."""
        return [0] + [n for n, parent in enumerate(self.parents) if parent >= 0]


class Chance:
    """Luck, from a list of decisions made in advance; past its end the first possible outcome happens.

    `probability` is that of all decisions together, `open` are the other outcomes there were along the way.
    """

    def __init__(self, script: Sequence[int] = ()):
        self.script = list(script)
        self.decisions: list[int] = []
        self.probability = 1.0
        self.open: list[list[int]] = []

    def draw(self, weights: Sequence[float]) -> int:
        """An index with probability proportional to its weight."""
        total = math.fsum(weights)
        possible = [i for i, weight in enumerate(weights) if weight > 0]
        assert possible, "drew from a distribution without mass"
        turn = len(self.decisions)
        if turn < len(self.script):
            choice = self.script[turn]
        else:
            choice = possible[0]
            self.open += [[*self.decisions, other] for other in possible[1:]]
        self.decisions.append(choice)
        self.probability *= weights[choice] / total
        return choice

    def accept(self, probability: float) -> bool:
        """True with this probability."""
        probability = min(1.0, max(0.0, probability))
        return self.draw([1.0 - probability, probability]) == 1


def outcomes(play: Callable[[Chance], Any]) -> Iterator[tuple[Any, float]]:
    """Every result that `play(chance)` can have, with its probability (a result may come up more than once)."""
    scripts: list[list[int]] = [[]]
    while scripts:
        chance = Chance(scripts.pop())
        result = play(chance)
        yield result, chance.probability
        scripts += chance.open


def distribution(play: Callable[[Chance], Any]) -> dict[Any, float]:
    """Exact distribution of `play(chance)`."""
    law: dict[Any, float] = defaultdict(float)
    for result, probability in outcomes(play):
        law[result] += probability
    return dict(law)


# The rules. Each takes a tree, p[n] (the target's distribution after node n) and chance; each returns the accepted
# path (root first) and the next token.

Decision = tuple[tuple[int, ...], int]


def greedy(tree: Tree, p: list[Dist], chance: Chance | None = None) -> Decision:
    """Follow the target's argmax as long as it was drafted."""
    node = 0
    while True:
        best = max(range(len(p[node])), key=lambda token: (p[node][token], -token))
        hits = [child for child in tree.children(node) if tree.tokens[child] == best]
        if not hits:
            return tuple(tree.path(node)), best
        node = hits[0]


def point_mass(tree: Tree, p: list[Dist], chance: Chance) -> Decision:
    """Leviathan et al. 2211.17192 with q(x) = 1: accept with p(x); after a rejection (p - q)+ is p without x."""
    node = 0
    while True:
        here = list(p[node])
        for child in tree.children(node):
            token = tree.tokens[child]
            if chance.accept(here[token] / math.fsum(here)):
                node = child
                break
            here[token] = 0.0
        else:
            return tuple(tree.path(node)), chance.draw(here)


def speculative_sampling(tree: Tree, p: list[Dist], chance: Chance) -> Decision:
    """Leviathan et al. 2211.17192, algorithm 1, on a chain."""
    assert tree.q is not None
    last = len(tree.nodes) - 1
    for i in range(last):
        token = tree.tokens[i + 1]
        if not chance.accept(min(1.0, p[i][token] / tree.q[i][token])):
            return tuple(range(i + 1)), chance.draw(positive(p[i], tree.q[i]))
    return tuple(range(last + 1)), chance.draw(p[last])


def block_verification(tree: Tree, p: list[Dist], chance: Chance) -> Decision:
    """Sun et al. 2403.10444, algorithm 2, on a chain; gamma is the row's draft length."""
    assert tree.q is not None
    gamma = len(tree.nodes) - 1
    weight = [1.0]  # p_i of the paper
    tau = 0
    for i in range(1, gamma + 1):
        token = tree.tokens[i]
        weight.append(min(weight[i - 1] * p[i - 1][token] / tree.q[i - 1][token], 1.0))
        if i < gamma:
            mass = math.fsum(positive([weight[i] * x for x in p[i]], tree.q[i]))
            # mass 0 and weight 1 is p = q: the next weight is 1 as well, so a longer block is taken for certain
            h = mass / (mass + 1 - weight[i]) if mass > 0 else 0.0
        else:
            h = weight[gamma]
        if chance.accept(h):
            tau = i
    if tau == gamma:
        token = chance.draw(p[gamma])
    else:
        token = chance.draw(positive([weight[tau] * x for x in p[tau]], tree.q[tau]))
    return tuple(range(tau + 1)), token


def recursive_rejection(tree: Tree, p: list[Dist], chance: Chance) -> Decision:
    """Sequoia 2402.12374, algorithm 2: siblings were drawn one after the other without replacement."""
    assert tree.q is not None
    node = 0
    while True:
        here, proposal = list(p[node]), list(tree.q[node])
        for child in tree.children(node):
            token = tree.tokens[child]
            if chance.accept(min(1.0, here[token] / proposal[token])):
                node = child
                break
            here = normalised(positive(here, proposal))
            proposal[token] = 0.0
            if any(proposal):  # else the draft's support is used up, and so are the children
                proposal = normalised(proposal)
        else:
            return tuple(tree.path(node)), chance.draw(here)


def typical(tree: Tree, p: list[Dist], chance: Chance, epsilon: float = 0.09, delta: float = 0.3) -> Decision:
    """Medusa 2401.10774, section 2.3.1: the longest path of typical tokens, the first such path among equals."""

    def is_typical(node: int) -> bool:
        before = p[tree.parents[node]]
        entropy = -math.fsum(x * math.log(x) for x in before if x > 0)
        return before[tree.tokens[node]] >= min(epsilon, delta * math.exp(-entropy))

    candidates = [tree.path(node) for node in tree.nodes if all(is_typical(n) for n in tree.path(node)[1:])]
    best = max(candidates, key=len)
    return tuple(best), chance.draw(p[best[-1]])


def positive(p: Dist, q: Dist) -> Dist:
    """(p - q)+"""
    return [max(0.0, x - y) for x, y in zip(p, q, strict=True)]


def normalised(p: Dist) -> Dist:
    total = math.fsum(p)
    return [x / total for x in p]


# A world small enough to enumerate: what the target and the draft say after every text.


@dataclass(frozen=True)
class World:
    """p[text] and q[text] for every text (a tuple of tokens) shorter than `length`; the prompt is the empty text.

    `stops(text)` says where the draft ends. It may look at the text and at q there, which makes the lengths ragged;
    it may not look at a token and then take it back.
    """

    vocab: int
    length: int
    p: dict[tuple[int, ...], Dist]
    q: dict[tuple[int, ...], Dist]
    stops: Callable[[tuple[int, ...]], bool]

    def law(self) -> dict[tuple[int, ...], float]:
        """The target's distribution over whole texts."""
        return {
            text: math.prod(self.p[text[:i]][text[i]] for i in range(self.length))
            for text in itertools.product(range(self.vocab), repeat=self.length)
        }

    def draft(self, branching: Sequence[int], chance: Chance | None) -> tuple[Tree, list[Dist]]:
        """A tree with `branching[d]` children at depth d, drawn, or q's top tokens if `chance` is None; and its p."""
        texts: list[tuple[int, ...]] = [()]
        parents = [-1]
        level = [0]
        for width in branching:
            below = []
            for node in level:
                if self.stops(texts[node]):
                    continue
                left = list(self.q[texts[node]])
                for _ in range(min(width, sum(x > 0 for x in left))):
                    token = left.index(max(left)) if chance is None else chance.draw(left)
                    left[token] = 0.0
                    below.append(len(texts))
                    texts.append((*texts[node], token))
                    parents.append(node)
            level = below
        q = None if chance is None else [self.q[text] for text in texts]
        tokens = [text[-1] if text else 0 for text in texts]
        return Tree(tokens, parents, q), [self.p[text] for text in texts]

    def generate(self, rule: Callable[..., Decision], branching: Sequence[int], drawn: bool, chance: Chance) -> tuple:
        """One text: a draft, the rule's verdict on it, and plain sampling for what is still missing."""
        tree, p = self.draft(branching, chance if drawn else None)
        path, token = rule(tree, p, chance)
        text = (*(tree.tokens[node] for node in path[1:]), token)[: self.length]
        while len(text) < self.length:
            text = (*text, chance.draw(self.p[text]))
        return text


def accepted_tokens(law: dict[Decision, float]) -> float:
    """Expected number of accepted draft tokens."""
    return math.fsum(probability * (len(path) - 1) for (path, _), probability in law.items())


def random_dist(rng: random.Random, vocab: int, zeros: int = 0) -> Dist:
    """A peaked distribution in which `zeros` tokens have no probability."""
    weights = [rng.expovariate(1.0) ** 1.5 + 0.02 for _ in range(vocab)]
    for token in rng.sample(range(vocab), zeros):
        weights[token] = 0.0
    return normalised(weights)


def random_world(
    seed: int, vocab: int, length: int, *, zeros_p: int = 0, zeros_q: int = 0, stopping: float = 0.2
) -> World:
    """Tables of random distributions. The draft ends at a text with chance `stopping`, never at the prompt."""
    rng = random.Random(seed)
    texts = [text for size in range(length) for text in itertools.product(range(vocab), repeat=size)]
    p = {text: random_dist(rng, vocab, zeros_p) for text in texts}
    q = {text: random_dist(rng, vocab, zeros_q) for text in texts}
    ends = {text for text in texts if text and rng.random() < stopping}
    return World(vocab, length, p, q, ends.__contains__)


def departure(counts: dict[Any, int], law: dict[Any, float]) -> float:
    """How far counted draws are from a law, in standard deviations: a true law stays below 5.

    The larger of two: the worst single cell, and a chi-square over all cells (those of fewer than 5 expected draws
    pooled), brought to a normal deviate by Wilson and Hilferty's cube root. A draw of an impossible outcome is
    infinitely far. With n draws a cell of probability r is wrong by `limit(n, r)` at the most unseen.
    """
    draws = sum(counts.values())
    if any(counts[outcome] for outcome in counts if law.get(outcome, 0.0) <= 0):
        return math.inf
    cells, pooled = [], [0.0, 0.0]
    for outcome, probability in law.items():
        expected, seen = draws * probability, counts.get(outcome, 0)
        if expected >= 5:
            cells.append((seen, expected))
        else:
            pooled[0] += seen
            pooled[1] += expected
    if pooled[1] > 0:
        cells.append((pooled[0], pooled[1]))
    if len(cells) < 2:
        return 0.0
    # For rare outcomes the normal bound is too tight: Poisson counts get one draw per deviation of slack.
    worst = max(abs(seen - mean) / (math.sqrt(mean * max(0.0, 1 - mean / draws)) + 1) for seen, mean in cells)
    chi2, freedom = sum((seen - mean) ** 2 / mean for seen, mean in cells), len(cells) - 1
    scale = 2 / (9 * freedom)
    return max(worst, ((chi2 / freedom) ** (1 / 3) - 1 + scale) / math.sqrt(scale))


def limit(draws: int, probability: float) -> float:
    """The absolute error of one cell that `departure(...) < 5` overlooks at most one time in a thousand."""
    return (5 + 3.1) * math.sqrt(probability * (1 - probability) / draws) + 5 / draws
