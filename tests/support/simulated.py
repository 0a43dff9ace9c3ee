"""Decoding without models or clocks: the real pacing drives proposers that are tables of costs and lists of chances.

Owns the simulated machine, its texts and its proposers. Seconds are in passes of the target over one token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from types import SimpleNamespace
from typing import Any

from specdec.proposers.base import Proposer
from specdec.proposers.draft_models.acceptance_estimates import CONFIDENCES
from specdec.proposers.hybrid import HybridProposer
from specdec.proposers.lookup.base import LIKELY, kind_of
from specdec.proposers.pacing.estimates import Estimates
from specdec.proposers.pacing.pacer import Pacer
from tests.support.slowdowns import quiet

# A target pass over n tokens, recorded: on two cores with AVX2 (float32, its products transposed, bfloat16), two
# with AVX-512 BF16, a GPU that is never full, and a machine that works in powers of two.
TABLES = {
    "float32": {1: 1.0, 2: 2.1, 4: 2.4, 8: 2.5, 16: 2.9, 32: 3.7, 64: 5.4},
    "cheap float32": {1: 1.0, 4: 1.2, 8: 1.7, 16: 2.2, 32: 3.2, 64: 5.4},
    "bf16 emulated": {1: 1.0, 2: 1.7, 4: 3.1, 8: 5.8, 16: 11.0, 32: 22.0, 64: 44.0},
    "bf16": {1: 1.0, 2: 0.98, 4: 0.97, 8: 1.07, 12: 1.25, 16: 1.31, 24: 1.56, 32: 1.73, 64: 2.6},
    "gpu": {1: 1.0, 16: 1.0, 17: 1.1, 32: 1.1, 33: 1.25, 64: 1.25},
    "powers of two": {
        1: 1.0,
        2: 1.2,
        3: 1.5,
        4: 1.5,
        5: 1.9,
        8: 1.9,
        9: 2.5,
        16: 2.5,
        17: 3.3,
        32: 3.3,
        33: 5.0,
        64: 5.0,
    },
}
WIDTH = 4  # children that a tree has at each depth of its best path


@dataclass
class Clock:
    """What pacing sees of the time: with a machine's noise. exact: without."""

    machine: Machine
    exact: float = 0.0

    @property
    def now(self) -> float:
        return self.machine.now

    def spend(self, seconds: float) -> float:
        """Returns what was seen."""
        seen = self.machine.noisy(seconds)
        self.exact += seconds
        return seen


@dataclass
class Text:
    """What a text holds for proposers, position by position.

    Attributes:
        found: length of the match that is found there, 0: none. is_right: is what follows it right?
        confidence: the draft model's in its best token. rank: of the right token among its children, WIDTH: not there.
    """

    found: list[int]
    is_right: list[bool]
    confidence: list[float]
    rank: list[int]

    def __len__(self) -> int:
        return len(self.found)

    def __add__(self, other: Text) -> Text:
        return Text(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    def parts(self, length: int) -> list[Text]:
        starts = range(0, len(self), length)
        return [Text(*(getattr(self, n)[i : i + length] for n in self.__dataclass_fields__)) for i in starts]


def text(
    length: int,
    repeats: float,
    knows: float,
    seed: int = 0,
    *,
    vain: float = 0.0,
    modest: float = 0.0,
    n_grams: float = 0.02,
) -> Text:
    """Random.

    Args:
        repeats: share of the text in stretches that repeat something: 95% of their tokens are as looked up.
        knows: the draft model's mean confidence. vain: how much of it is unfounded.
        modest: chance that its best token is right, however unsure it is.
        n_grams: chance that a single token found elsewhere is followed by the same.
    """
    random = Random(seed)
    out = Text([], [], [], [])
    while len(out) < length:
        repeating, match = random.random() < repeats, 3
        for _ in range(random.randint(12, 36)):
            out.found.append(match if repeating else int(random.random() < 0.6))
            out.is_right.append(random.random() < (0.95 if repeating else n_grams))
            match = match + 1 if out.is_right[-1] else 3
            confidence = min(0.99, max(0.02, random.betavariate(3 * knows, 3 * (1 - knows))))
            out.confidence.append(confidence)
            ranks = [p * (1 - vain) for p in _children(confidence)]
            draw, rank = random.random(), 0
            while rank < WIDTH and draw >= ranks[rank]:
                draw -= ranks[rank]
                rank += 1
            out.rank.append(0 if modest and random.random() < modest else rank)
    return out.parts(length)[0]


def _children(confidence: float) -> list[float]:
    return [confidence, *(0.6 * (1 - confidence) * 0.5**i for i in range(WIDTH - 1))]


@dataclass
class Machine:
    """Seconds of passes.

    Args:
        table: of the target's, by tokens. step: of a draft model's. reading: of a token of the prompt by the draft
            model. looking: until it is decided whether to draft. noise: standard deviation, as a share; one pass in
            200 takes three times as long.
    """

    table: dict[int, float]
    step: float = 0.0
    reading: float = 0.0
    looking: float = 0.0
    noise: float = 0.03
    slowdown: Callable[[float], float] = quiet
    random: Random = field(default_factory=lambda: Random(1))
    now: float = 0.0

    def seconds(self, tokens: int) -> float:
        sizes = sorted(self.table)
        for low, high in pairwise(sizes):
            if tokens <= high:
                share = max(0, tokens - low) / (high - low)
                return (1 - share) * self.table[low] + share * self.table[high]
        return self.table[sizes[-1]] * tokens / sizes[-1]

    def noisy(self, seconds: float) -> float:
        """Seconds that work takes now, by a machine that other programs use."""
        if self.noise:
            slow = 3.0 if self.random.random() < 0.005 else 1.0
            seconds *= self.slowdown(self.now) * slow * max(0.5, self.random.gauss(1, self.noise))
        self.now += seconds
        return seconds


@dataclass(frozen=True)
class Context:
    """What proposers and `HybridProposer` look at: one row at a place in a text."""

    text: Text
    place: int
    pacer: Pacer
    machine: Machine
    clock: Clock
    prompt: int
    batch_size: int = 1

    @property
    def rows(self) -> list[int]:
        return [0]

    @property
    def budget(self) -> list[int]:
        return [len(self.text) - self.place - 1]

    @property
    def ends(self) -> list[int]:
        return [self.prompt + self.place]

    @property
    def pads(self) -> list[int]:
        return [0]


@dataclass
class Draft:
    """accepted: of its path. size: nodes, the root included."""

    size: int = 1
    accepted: int = 0
    keys: tuple[Any, ...] = ()


class Lookup(Proposer):
    """As `NgramProposer` does: chances are known beforehand, drafting is free, guesses are booked, drafted or not."""

    paces_itself = True

    def begin(self, context: Any) -> None:
        self._guess: tuple[int, int, list[Any]] | None = None  # place, right tokens, keys

    def propose(self, context: Any) -> Any:
        return self.draft(context, self.expect(context))

    def expect(self, context: Any) -> list[float]:
        pacer, here = context.pacer, context.place
        if self._guess is not None:
            place, right, keys = self._guess
            pacer.observe_confidence(keys[: here - place], min(right, here - place))
        self._guess = None
        n = context.text.found[here]
        if n == 0 or context.budget[0] <= 0:
            return []
        right = _run(context.text.is_right, here)
        keys = [("ngram", kind_of(n + depth)) for depth in range(min(pacer.limit, 32))]
        self._guess = (here, right, keys)
        return _gains(pacer, keys)[: context.budget[0]]

    def draft(self, context: Any, gains: Sequence[float]) -> Any:
        length = context.pacer.best_length(gains, 1)
        if length == 0:
            return Draft()
        return Draft(1 + length, min(length, self._guess[1] if self._guess else 0))


def _gains(pacer: Pacer, keys: Sequence[Any]) -> list[float]:
    out, chance, rate = [], 1.0, None
    for key in keys:
        rate = pacer.acceptance.rate(key, like=LIKELY[key[1]] if rate is None else rate)
        chance *= rate
        out.append(chance)
    return out


def _run(right: Sequence[bool], start: int) -> int:
    count = 0
    while start + count < len(right) and right[start + count]:
        count += 1
    return count


class Model(Proposer):
    """As `AutoregressiveProposer` does: a pass per token, whose confidence is known before the token is drafted."""

    paces_itself = True

    def begin(self, context: Any) -> None:
        self._read = False

    def propose(self, context: Any) -> Any:
        pacer, budget = context.pacer, context.budget[0]
        if context.machine.looking:
            context.clock.spend(context.machine.looking)
        limit, backlog = min(pacer.limit, budget), 0 if self._read else context.prompt
        if limit <= 0 or not pacer.may_start([pacer.expected_rate], 1, backlog=backlog, tokens_left=budget):
            return Draft()
        seconds = context.clock.spend(context.machine.step + backlog * context.machine.reading)
        self._read = True
        pacer.observe_draft_pass(seconds, 1 + backlog)
        return self._grow(context, limit)

    def _step(self, context: Any) -> None:
        context.pacer.observe_draft_pass(context.clock.spend(context.machine.step))

    def _grow(self, context: Any, limit: int) -> Draft:
        pacer, keys, chance, alive, accepted = context.pacer, [], 1.0, True, 0
        while True:
            place = context.place + len(keys)
            # behind a wrong token the model is as sure as elsewhere, and wrong
            confidence = context.text.confidence[place]
            key = 1 + int(confidence * (CONFIDENCES - 1e-3))
            rate = pacer.acceptance.rate(key, prior=key / CONFIDENCES)
            pacer.observe_expectation(rate)
            chance *= rate
            if not pacer.worth([chance], len(keys)):
                break
            keys.append(key)
            alive = alive and context.text.rank[place] == 0
            accepted += alive
            if len(keys) >= limit or not pacer.worth([chance * pacer.expected_rate], len(keys), draft_steps=1):
                break
            self._step(context)
        return Draft(1 + len(keys), accepted, tuple(keys))


class Tree(Model):
    """As a head with a `DynamicTree` does: children of the best path at each depth; as many are kept as pay."""

    DEPTH = 8

    def _grow(self, context: Any, limit: int) -> Draft:
        pacer, path, nodes = context.pacer, 1.0, []
        limit = min(limit, self.DEPTH)
        for depth in range(limit):
            confidence = context.text.confidence[context.place + depth]
            nodes += [(path * p, depth, rank) for rank, p in enumerate(_children(confidence))]
            mass = path * sum(_children(confidence))
            path *= confidence
            onward = pacer.expected_rate * min(1.0, mass)
            if depth + 1 == limit or not pacer.worth([onward], depth + 1, draft_steps=1):
                break
            self._step(context)
        nodes.sort(reverse=True)
        self._bins = {p: 1 + int(p * (CONFIDENCES - 1e-3)) for p, _, _ in nodes}
        gains = sorted((pacer.acceptance.rate(self._bins[p], prior=p) for p, _, _ in nodes), reverse=True)
        size = pacer.best_length(gains, 1) if pacer.length is None else len(nodes)
        if size == 0:
            pacer.observe_expectation(gains[0])
            return Draft()
        kept, accepted = nodes[:size], 0
        ranks = {(depth, rank) for _, depth, rank in kept}
        reached = True
        right = []
        for depth in range(limit):
            rank = context.text.rank[context.place + depth]
            reached = reached and (depth, rank) in ranks
            if not reached:
                break
            accepted += 1
            right.append((depth, rank))
            reached = rank == 0
        for p, depth, rank in kept:
            pacer.acceptance.observe(self._bins[p], (depth, rank) in right, prior=p)
        deepest = max(depth for _, depth, _ in kept) + 1
        for depth in range(min(accepted + 1, deepest)):
            pacer.observe_expectation(float(depth < accepted))
        return Draft(1 + size, accepted)


def decode(
    proposer: Proposer | None,
    text: Text,
    machine: Machine,
    estimates: Estimates,
    *,
    prompt: int = 40,
    length: int | None = None,
    sizes: list[int] | None = None,
) -> float:
    """Seconds of one call after its prefill; without a proposer, of plain decoding. sizes: gets each pass's nodes."""
    if proposer is None:
        return (len(text) - 1) * machine.seconds(1)
    clock, pacer, place = Clock(machine), Pacer(length, estimates), 0
    pacer.observe_prefill(prompt, 0.08 * prompt)
    context = Context(text, place, pacer, machine, clock, prompt)
    proposer.begin(context)  # type: ignore[arg-type]
    while place < len(text) - 1:
        start = clock.now
        draft: Any = proposer.propose(Context(text, place, pacer, machine, clock, prompt))  # type: ignore[arg-type]
        drafting = clock.now - start
        clock.spend(machine.seconds(draft.size))
        if sizes is not None:
            sizes.append(draft.size)
        accepted = min(draft.accepted, len(text) - 2 - place)
        pacer.observe_passes(draft.size, drafting, clock.now - start - drafting)
        proposer.observe(draft, SimpleNamespace(), [accepted])  # type: ignore[arg-type]
        if draft.keys:
            pacer.observe_confidence(draft.keys, accepted)
        pacer.observe_round(draft.size, 1, 1 + accepted)
        place += 1 + accepted
    return clock.exact


KINDS = {
    "lookup": (Lookup, 0.0),
    "draft model": (Model, 0.35),
    "head": (Tree, 0.15),
    "hybrid": (lambda: HybridProposer(Model(), Lookup()), 0.35),  # type: ignore[arg-type]
    "hybrid head": (lambda: HybridProposer(Tree(), Lookup()), 0.15),  # type: ignore[arg-type]
}


def speedups(
    kind: str,
    table: str,
    texts: Sequence[Text],
    *,
    length: int | None = None,
    prompt: int = 40,
    noise: float = 0.03,
    looking: float = 0.0,
    slowdown: Callable[[float], float] = quiet,
    estimates: Estimates | None = None,
    sizes: list[int] | None = None,
) -> list[float]:
    """Of each call over plain decoding, one after the other in one process."""
    make, step = KINDS[kind]
    machine = Machine(TABLES[table], step, 0.08 * step if step else 0.0, looking, noise, slowdown)
    proposer, estimates = make(), estimates or Estimates()
    return [
        decode(None, t, machine, estimates)
        / decode(proposer, t, machine, estimates, length=length, prompt=prompt, sizes=sizes)
        for t in texts
    ]


# Texts of all kinds, as several calls: those that drafts pay for, and those that they never do.
CALLS, TOKENS = 8, 64
TEXTS = {
    "good": text(CALLS * TOKENS, repeats=0.7, knows=0.75, seed=5).parts(TOKENS),
    "very good": text(CALLS * TOKENS, repeats=1.0, knows=0.92, seed=7).parts(TOKENS),
    "switching": [text(TOKENS, 0.9 * (i % 2), 0.15 + 0.65 * (i % 2), seed=i) for i in range(CALLS)],
}
HOPELESS = {
    "hopeless": text(CALLS * TOKENS, repeats=0.0, knows=0.15, seed=3).parts(TOKENS),
    "sure in vain": text(CALLS * TOKENS, repeats=0.0, knows=0.5, seed=4, vain=0.9).parts(TOKENS),
}


def over_all(each: Sequence[float]) -> float:
    """Speed-up over several calls of one length, by their own."""
    return len(each) / sum(1 / speed for speed in each)
