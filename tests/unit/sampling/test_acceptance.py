"""The verification rules: by hand, against `naive`, and their theorem by counting draws.

`naive` is shown to be exact by enumeration (no luck involved); the fast rules are shown to decide as `naive` does and,
independently of it, to leave the target's distribution as it is.
"""

import collections
import inspect
import itertools
import types

import pytest
import torch
from torch import Tensor

from specdec.sampling import acceptance
from specdec.sampling.draft_tree import DraftTree
from specdec.sampling.results import RoundResult
from specdec.sampling.sequential_acceptance import accept_sequentially
from tests.support import naive

DRAWS = 200_000
EXACT = 5.0  # standard deviations; one false alarm in a million cells, and the seeds are fixed


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


# By hand


@pytest.fixture
def luck(monkeypatch):
    """luck(accept, then): the uniforms that acceptance compares with, in order, and the one that a draw inverts."""

    def set_luck(accept: list[float], then: float | list[float]) -> None:
        left = list(accept)

        def rand_like(x: Tensor) -> Tensor:
            taken = [left.pop(0) for _ in range(x.numel())]
            return torch.tensor(taken, dtype=x.dtype).view_as(x)

        def rand(shape, **kwargs) -> Tensor:
            return torch.tensor(then, dtype=torch.float32).expand(shape)

        monkeypatch.setattr(torch, "rand_like", rand_like)
        monkeypatch.setattr(torch, "rand", rand)

    return set_luck


def chain(drafted: list[int], q: list[list[float]] | None = None) -> DraftTree:
    drafts = torch.tensor([drafted], dtype=torch.long).view(1, -1)
    return DraftTree.from_chain(torch.tensor([0]), drafts, probs=None if q is None else torch.tensor([q]))


def decided(result: RoundResult) -> tuple[list[int], int]:
    """Accepted nodes and next token of a single row."""
    return result.path[0, 1 : 1 + int(result.accepted)].tolist(), int(result.next_token)


@pytest.mark.parametrize(
    ("probs", "uniform", "expected"),
    [
        pytest.param([0.25, 0.75], 0.2, 0, id="inside the first token's quarter"),
        pytest.param([0.25, 0.75], 0.25, 1, id="on the border: the first token has [0, .25)"),
        pytest.param([0.0, 0.0, 1.0], 0.0, 2, id="u = 0 does not draw a leading zero"),
        pytest.param([0.5, 0.0, 0.5], 0.5, 2, id="a border does not draw the zero between"),
        pytest.param([0.5, 0.5, 0.0], 1 - 2**-24, 1, id="the largest u does not draw a trailing zero"),
        pytest.param([0.1, 0.2, 0.0, 0.0], 1 - 2**-24, 1, id="nor does it where the mass is below one"),
        pytest.param([1e-38, 0.0], 1 - 2**-24, 0, id="nor where it is all but gone"),
        pytest.param([2.0, 6.0], 0.3, 1, id="weights need no normalising: 0.3 of 8 is past 2"),
    ],
)
def test_sample_by_hand(luck, probs, uniform, expected):
    luck([], uniform)
    assert acceptance.sample(torch.tensor(probs)).item() == expected


@pytest.mark.parametrize("uniform", [0.0, 1e-38, 2.0**-24, 0.5, 1 - 2.0**-24])
def test_sample_never_returns_a_token_of_probability_zero(luck, uniform):
    generator = torch.Generator().manual_seed(1)
    probs = torch.rand(500, 1000, generator=generator).pow(8)
    probs *= torch.rand(probs.shape, generator=generator) < 0.1
    probs[:, :3] = probs[:, -3:] = 0
    luck([], uniform)
    for scaled in (probs, probs / probs.sum(-1, keepdim=True), probs * 1e-30):
        assert (scaled.gather(-1, acceptance.sample(scaled)[:, None]) > 0).all()


def test_sample_has_the_distribution():
    probs = torch.tensor([0.3, 0.0, 0.05, 0.001, 0.649, 0.0])
    drawn = acceptance.sample(probs.expand(3, DRAWS // 2, 6)).flatten()
    counts = dict(enumerate(drawn.bincount(minlength=6).tolist()))
    assert naive.departure(counts, dict(enumerate(probs.double().tolist()))) < EXACT


def test_sample_over_a_large_vocabulary():
    """151,936 tokens of which ten carry the mass: float32 sums lose none of them."""
    probs = torch.full((151_936,), 1e-9)
    heavy = torch.arange(7, 151_936, 15_000)
    probs[heavy] += torch.arange(1.0, 1 + len(heavy)) / 100
    law = (probs.double() / probs.double().sum())[heavy]
    drawn = torch.cat([acceptance.sample(probs.expand(250, -1)) for _ in range(8)])
    counts = {int(token): int((drawn == token).sum()) for token in heavy}
    counts["rest"] = len(drawn) - sum(counts.values())
    expected = dict(zip(map(int, heavy), law.tolist(), strict=True)) | {"rest": 1 - float(law.sum())}
    assert naive.departure(counts, expected) < EXACT


def greedy(tree: DraftTree, scores: torch.Tensor) -> RoundResult:
    """`accept_sequentially` along the best tokens of scores (B, N, V)."""
    rows = torch.arange(len(scores))

    def choose(path, alive):
        return scores[rows, path[:, -1]].max(-1).indices

    return accept_sequentially(tree, choose, torch.ones(len(scores), dtype=torch.bool))


@pytest.mark.parametrize(
    ("target", "drafted", "accepted", "next_token"),
    [
        pytest.param([[0, 9, 0], [0, 0, 9], [9, 0, 0]], [1, 2], [1, 2], 0, id="all accepted, bonus"),
        pytest.param([[0, 9, 0], [0, 0, 9], [9, 0, 0]], [1, 0], [1], 2, id="second differs, recovered"),
        pytest.param([[0, 9, 0], [0, 0, 9], [9, 0, 0]], [2, 2], [], 1, id="what follows a miss does not count"),
        pytest.param([[0, 9, 0]], [], [], 1, id="root alone is plain decoding"),
        pytest.param([[0, 9, 9], [9, 0, 0]], [1], [1], 0, id="of equal maxima the first"),
    ],
)
def test_greedy_by_hand(target, drafted, accepted, next_token):
    tree = chain(drafted) if drafted else DraftTree.root_only(torch.tensor([0]))
    result = greedy(tree, torch.tensor([target], dtype=torch.bfloat16))
    assert decided(result) == (list(range(1, 1 + len(accepted))), next_token)
    assert result.tokens[0, : len(accepted) + 1].tolist() == [*accepted, next_token]


HALF, ONE, TWO = [0.5, 0.5], [1.0, 0.0], [0.0, 1.0]


@pytest.mark.parametrize(
    ("target", "draft", "drafted", "uniforms", "then", "expected"),
    [
        pytest.param([HALF, HALF], [ONE], [0], [0.4], 0.9, ([1], 1), id="ratio one half, draw below it: accept"),
        pytest.param([HALF, HALF], [ONE], [0], [0.6], 0.0, ([], 1), id="ratio one half, draw above it: resample to 1"),
        pytest.param([HALF, HALF], [ONE], [0], [0.5], 0.0, ([], 1), id="on the border: rejected"),
        pytest.param([ONE, HALF], [HALF], [0], [1 - 2**-24], 0.2, ([1], 0), id="ratio two: always accepted"),
        pytest.param([TWO, HALF], [HALF], [0], [0.0], 0.0, ([], 1), id="impossible for the target: never accepted"),
        pytest.param([HALF, ONE], [HALF], [1], [1 - 2**-24], 0.9, ([1], 0), id="p = q is always accepted, then p"),
        pytest.param([HALF, HALF, ONE], [ONE, ONE], [0, 0], [0.4, 0.6], 0.0, ([1], 1), id="first accepted, second not"),
        pytest.param([HALF, HALF, ONE], [ONE, ONE], [0, 0], [0.6, 0.4], 0.0, ([], 1), id="nothing counts after a miss"),
        pytest.param([HALF, HALF, ONE], [ONE, ONE], [0, 0], [0.4, 0.4], 0.0, ([1, 2], 0), id="both, then a bonus"),
        pytest.param(
            [[0.5, 0.3, 0.2], [*HALF, 0]], [[0.7, 0.1, 0.2]], [0], [0.8], 0.99, ([], 1), id="only 1 gained: 1 is left"
        ),
    ],
)
@pytest.mark.parametrize("rule", ["speculative_sampling", "recursive_rejection"])
def test_token_by_token_by_hand(luck, rule, target, draft, drafted, uniforms, then, expected):
    if rule == "recursive_rejection" and uniforms[0] == 0.6:
        uniforms = [0.6, 0.6]  # it stops asking at the first rejection, but asks for all rows of the batch
    luck(uniforms, then)
    result = getattr(acceptance, rule)(chain(drafted, draft), torch.tensor([target]))
    assert decided(result) == expected


@pytest.mark.parametrize(
    ("target", "draft", "drafted", "uniforms", "then", "expected"),
    [
        pytest.param([HALF, ONE], [ONE], [0], [0.0, 0.4], 0.0, ([1], 0), id="one token: h = p/q, draw below it"),
        pytest.param([HALF, ONE], [ONE], [0], [0.0, 0.6], 0.0, ([], 1), id="one token, draw above it: residual"),
        # w_1 = 1/2, w_2 = min(1, 1/2 * 1 / (1/2)) = 1: a block that token by token would lose half the time
        pytest.param(
            [HALF, ONE, ONE],
            [ONE, HALF],
            [0, 0],
            [0.0, 0.99, 0.99],
            0.0,
            ([1, 2], 0),
            id="a likely second saves the first",
        ),
        # ... and if the second is impossible: S_1 = ((1/2, 0) - (1/2, 1/2))+ = 0, h_1 = h_2 = 0
        pytest.param(
            [HALF, ONE, ONE], [ONE, HALF], [0, 1], [0.0, 0.0, 0.0], 0.0, ([], 1), id="an unlikely second costs it"
        ),
        # w_1 = 1/2, S_1 = ((0, 1/2) - (1, 0))+ = 1/2, h_1 = 1/2 / (1/2 + 1 - 1/2) = 1/2; w_2 = 0
        pytest.param([HALF, TWO, ONE], [ONE, ONE], [0, 0], [0.0, 0.4, 0.0], 0.0, ([1], 1), id="h = 1/2, draw below it"),
        pytest.param([HALF, TWO, ONE], [ONE, ONE], [0, 0], [0.0, 0.6, 0.0], 0.0, ([], 1), id="h = 1/2, draw above it"),
        # the residual after w_1 = 1/2 is (1/2 p - q)+ = ((.375, .125, 0) - (.25, .25, .5))+: token 0 alone
        pytest.param(
            [[0.5, 0.5, 0], [0.75, 0.25, 0], [1, 0, 0]],
            [[1, 0, 0], [0.25, 0.25, 0.5]],
            [0, 2],
            [0.0, 0.0, 0.0],
            0.99,
            ([1], 0),
            id="the residual is weighted",
        ),
        pytest.param(
            [HALF, HALF, TWO], [HALF, HALF], [0, 1], [0, 0.99, 0.99], 0.0, ([1, 2], 1), id="p = q takes all: 0 / 0"
        ),
    ],
)
def test_block_by_hand(luck, target, draft, drafted, uniforms, then, expected):
    luck(uniforms, then)  # the first uniform is the root's and decides nothing
    result = acceptance.block_verification(chain(drafted, draft), torch.tensor([target], dtype=torch.float32))
    assert decided(result) == expected


@pytest.mark.parametrize(
    ("target", "draft", "siblings", "uniforms", "then", "expected"),
    [
        pytest.param([0.25, 0.25, 0.5], [0.5, 0.5, 0], [0, 1], [0.4, 0], 0.9, ([1], 2), id="first sibling, ratio 1/2"),
        pytest.param([0.25, 0.25, 0.5], [0.5, 0.5, 0], [0, 1], [0.6, 0], 0.0, ([], 2), id="residual is token 2 alone"),
        pytest.param([0, 0.75, 0.25], [0.5, 0.25, 0.25], [0, 1], [0, 0.99], 0.9, ([2], 2), id="now the second is sure"),
        # residual (0, .3, .5, 0) / .8 = (0, .375, .625, 0); q left (0, 1/2, 0, 1/2): ratio 3/4
        pytest.param(
            [0, 0.5, 0.5, 0],
            [0.6, 0.2, 0, 0.2],
            [0, 1],
            [0.5, 0.7],
            0.9,
            ([2], 3),
            id="q renormalised: 3/4, draw below",
        ),
        pytest.param(
            [0, 0.5, 0.5, 0], [0.6, 0.2, 0, 0.2], [0, 1], [0.5, 0.8], 0.0, ([], 2), id="q renormalised: draw above"
        ),
        pytest.param([0, 0.5, 0.5, 0], [0.6, 0.2, 0, 0.2], [0, 3], [0.0, 0.0], 0.0, ([], 2), id="none fits: 2 is left"),
        pytest.param([0.2, 0.8], [1.0, 0.0], [0, None], [0.5, 0.0], 0.0, ([], 1), id="the draft knew no other"),
    ],
)
def test_recursive_by_hand(luck, target, draft, siblings, uniforms, then, expected):
    """A root and two siblings; after either of them the target always says its last token."""
    V = len(target)
    last = [0.0] * (V - 1) + [1.0]
    parents = [[-1] + [-1 if token is None else 0 for token in siblings]]
    tokens = [[0] + [0 if token is None else token for token in siblings]]
    q = [[draft, [0.0] * V, [0.0] * V]]
    tree = DraftTree(torch.tensor(tokens), torch.tensor(parents), torch.tensor(q))
    luck(uniforms, then)
    result = acceptance.recursive_rejection(tree, torch.tensor([[target, last, last]], dtype=torch.float32))
    assert decided(result) == expected


@pytest.mark.parametrize(
    ("uniforms", "expected"),
    [
        pytest.param([0.1, 0.1, 0.9, 0.9, 0.9], ([1, 3], 0), id="left, then its child"),
        pytest.param([0.6, 0.1, 0.9, 0.9, 0.9], ([2], 0), id="right, which has no child"),
        pytest.param([0.9, 0.1, 0.1, 0.9, 0.9], ([], 2), id="neither"),
        pytest.param([0.1, 0.9, 0.9, 0.9, 0.9], ([1], 2), id="left, not its child"),
    ],
)
def test_point_mass_by_hand(luck, uniforms, expected):
    """Root with children 0 and 1, and 0 has a child 0; p is (.5, .25, .25) after every node."""
    tree = DraftTree(torch.tensor([[7, 0, 1, 0, 5]]), torch.tensor([[-1, 0, 0, 1, -1]]))
    # uniforms of nodes 0 to 4; a rejected or missing child shows in the token that stands there
    order = torch.tensor([uniforms])
    luck([], order.tolist())
    probs = torch.tensor([0.5, 0.25, 0.25]).expand(1, 5, 3).clone()
    probs[0, 3] = torch.tensor([1.0, 0, 0])
    probs[0, 2] = torch.tensor([1.0, 0, 0])
    result = acceptance.point_mass(tree, probs)
    assert decided(result) == expected


@pytest.mark.parametrize(
    ("target", "drafted", "accepted"),
    [
        pytest.param([0.9, 0.1], 1, 1, id="0.1 is above the hard threshold of 0.09"),
        pytest.param([0.95, 0.05], 1, 0, id="0.05 is below it"),
        pytest.param([0.125] * 8, 3, 1, id="uniform over 8: threshold 0.3 / 8"),
        pytest.param([0.0] + [0.125] * 8, 0, 0, id="impossible"),
    ],
)
def test_typical_by_hand(target, drafted, accepted):
    result = acceptance.typical(chain([drafted]), torch.tensor([[target, target]]))
    assert result.accepted.tolist() == [accepted]


@pytest.mark.parametrize("rule", ["speculative_sampling", "block_verification", "recursive_rejection"])
def test_a_rule_for_drawn_drafts_refuses_a_deterministic_one(rule):
    with pytest.raises(ValueError, match="deterministic draft"):
        getattr(acceptance, rule)(chain([1]), torch.full((1, 2, 2), 0.5))


# The reference is exact: every outcome of draft, rule and continuation, enumerated.

RULES = [  # rule, children per depth, drawn
    pytest.param("speculative_sampling", (1, 1), True, id="token, chain"),
    pytest.param("block_verification", (1, 1), True, id="block, chain"),
    pytest.param("block_verification", (1, 1, 1), True, id="block, chain of 3"),
    pytest.param("recursive_rejection", (1, 1), True, id="recursive, chain"),
    pytest.param("recursive_rejection", (2, 1), True, id="recursive, tree 2x1"),
    pytest.param("recursive_rejection", (2, 2), True, id="recursive, tree 2x2"),
    pytest.param("recursive_rejection", (3, 1), True, id="recursive, tree 3x1"),
    pytest.param("point_mass", (1, 1), False, id="point mass, chain"),
    pytest.param("point_mass", (2, 2), False, id="point mass, tree 2x2"),
    pytest.param("point_mass", (3, 1), False, id="point mass, tree 3x1"),
]
ZEROS = [
    pytest.param(0, 0, id="full support"),
    pytest.param(1, 0, id="p has zeros"),
    pytest.param(0, 1, id="q has zeros"),
    pytest.param(1, 1, id="both have zeros"),
]


@pytest.mark.parametrize(("zeros_p", "zeros_q"), ZEROS)
@pytest.mark.parametrize(("rule", "branching", "drawn"), RULES)
def test_reference_is_exact(rule, branching, drawn, zeros_p, zeros_q):
    length = len(branching) + 1
    world = naive.random_world(len(branching), 3, length, zeros_p=zeros_p, zeros_q=zeros_q)
    law = naive.distribution(lambda chance: world.generate(getattr(naive, rule), branching, drawn, chance))
    for text, probability in world.law().items():
        assert law.pop(text, 0.0) == pytest.approx(probability, abs=1e-12)
    assert not law


def test_typical_is_not_exact():
    world = naive.random_world(2, 3, 3)
    law = naive.distribution(lambda chance: world.generate(naive.typical, (1, 1), True, chance))
    assert max(abs(law.get(text, 0.0) - probability) for text, probability in world.law().items()) > 0.02


@pytest.mark.parametrize("seed", range(20))
def test_block_accepts_at_least_as_many_as_token_by_token(seed):
    """In expectation over drafts, exactly; Sun et al. theorem 2. And more somewhere."""
    world = naive.random_world(seed, 3, 4)
    mean = {}
    for rule in (naive.speculative_sampling, naive.block_verification):

        def accepted(chance, rule=rule):
            return len(rule(*world.draft((1, 1, 1), chance), chance)[0]) - 1

        law = naive.distribution(accepted)
        mean[rule] = sum(count * probability for count, probability in law.items())
    assert mean[naive.block_verification] >= mean[naive.speculative_sampling] - 1e-12
    assert mean[naive.block_verification] > mean[naive.speculative_sampling] + 1e-4


# The fast rules decide as the reference does, on any tree.


def random_trees(seed: int, drawn: bool, chains: bool, count: int = 24, nodes: int = 6, vocab: int = 5):
    """Single-row trees of up to `nodes` nodes with their p, a quarter of them shorter ones."""
    rng = torch.Generator().manual_seed(seed)

    def below(n: int) -> int:
        return int(torch.randint(n, (), generator=rng))

    for case in range(count):
        size = 1 + below(nodes) if case % 4 else nodes
        world = naive.random.Random(seed * 1000 + case)
        p = [naive.random_dist(world, vocab, zeros=below(3)) for _ in range(size)]
        q = [naive.random_dist(world, vocab, zeros=below(3)) for _ in range(size)]
        parents, tokens = [-1], [0]
        for node in range(1, size):
            # a node can have as many children as its q has tokens
            free = {
                parent: [
                    token
                    for token in range(vocab)
                    if q[parent][token] > 0 and all(tokens[n] != token for n in range(1, node) if parents[n] == parent)
                ]
                for parent in ([node - 1] if chains else range(node))
            }
            parent = [parent for parent, left in free.items() if left]
            parent = parent[below(len(parent))]
            parents.append(parent)
            tokens.append(free[parent][below(len(free[parent]))])
        yield naive.Tree(tokens, parents, q if drawn else None), p


def batched(cases, copies: int, chain: bool) -> tuple[DraftTree, Tensor]:
    """All cases side by side, `copies` rows of each, padded to the widest; padding is noise."""
    N = max(len(tree.tokens) for tree, _ in cases)
    V = len(cases[0][1][0])
    tokens = torch.full((len(cases), N), V - 1)
    parents = torch.full((len(cases), N), -1)
    probs = torch.full((len(cases), N, V), 1 / V)
    q = torch.zeros(len(cases), N, V)
    for b, (tree, p) in enumerate(cases):
        size = len(tree.tokens)
        tokens[b, :size], parents[b, :size] = torch.tensor(tree.tokens), torch.tensor(tree.parents)
        probs[b, :size] = torch.tensor(p)
        for node in range(size):
            if tree.q is not None and tree.children(node):
                q[b, node] = torch.tensor(tree.q[node])
    drawn = cases[0][0].q is not None
    repeat = [x.repeat_interleave(copies, 0) for x in (tokens, parents, probs, q)]
    return DraftTree(repeat[0], repeat[1], repeat[3] if drawn else None, chain=chain), repeat[2]


@pytest.mark.parametrize(
    ("rule", "drawn", "chains"),
    [
        pytest.param("speculative_sampling", True, True, id="token, chains"),
        pytest.param("block_verification", True, True, id="block, chains"),
        pytest.param("recursive_rejection", True, True, id="recursive, chains"),
        pytest.param("recursive_rejection", True, False, id="recursive, trees"),
        pytest.param("point_mass", False, True, id="point mass, chains"),
        pytest.param("point_mass", False, False, id="point mass, trees"),
        pytest.param("point_mass", True, False, id="point mass, drawn trees"),
        pytest.param("typical", True, True, id="typical, chains"),
        pytest.param("typical", False, False, id="typical, trees"),
    ],
)
def test_decides_as_the_reference(rule, drawn, chains):
    copies = 5_000
    cases = list(random_trees(3, drawn, chains))
    tree, probs = batched(cases, copies, chains)
    result = getattr(acceptance, rule)(tree, probs)
    for case, (reference, p) in enumerate(cases):
        rows = slice(case * copies, (case + 1) * copies)
        seen = torch.cat([result.accepted[rows, None], result.next_token[rows, None], result.path[rows]], 1)
        values, counts = seen.unique(dim=0, return_counts=True)
        got = collections.Counter()
        for (accepted, token, *path), count in zip(values.tolist(), counts.tolist(), strict=True):
            assert path[accepted + 1 :] == list(range(accepted + 1, len(path)))  # no-ops behind the accepted path
            got[(*path[: accepted + 1],), token] += count
        law = naive.distribution(lambda chance, r=reference, p=p: getattr(naive, rule)(r, p, chance))
        law = {outcome: probability for outcome, probability in law.items() if probability > 1e-6}
        law |= {outcome: 1e-6 for outcome in got if outcome not in law and got[outcome] <= 2}  # rounding of 0.1 + 0.2
        assert naive.departure(got, law) < EXACT, (case, reference)


@pytest.mark.parametrize("chains", [True, False])
@pytest.mark.parametrize("drawn", [True, False])
def test_greedy_decides_as_the_reference(drawn, chains):
    cases = list(random_trees(4, drawn, chains, count=200))
    cases = [(tree, [[round(x, 1) for x in dist] for dist in p]) for tree, p in cases]  # ties
    for case, (tree, p) in enumerate(cases):  # half of them drafted what the target says
        if case % 2:
            for node in tree.nodes[1:]:
                if tree.children(tree.parents[node])[0] == node:
                    tree.tokens[node] = p[tree.parents[node]].index(max(p[tree.parents[node]]))
    tree, scores = batched(cases, 1, chains)
    result = greedy(tree, scores)
    for b, (reference, p) in enumerate(cases):
        path, token = naive.greedy(reference, p)
        assert result.path[b, : len(path)].tolist() == list(path)
        assert (int(result.accepted[b]), int(result.next_token[b])) == (len(path) - 1, token)


# The theorem itself, for the fast rules: draft, decide, go on by plain sampling, count whole texts.


class Tables:
    """A `naive.World` as tensors: row i of each table belongs to the text with number i."""

    def __init__(self, world: naive.World):
        self.world = world
        self.numbers = {
            text: self.number(text)
            for size in range(world.length)
            for text in itertools.product(range(world.vocab), repeat=size)
        }
        order = sorted(self.numbers, key=self.numbers.__getitem__)
        self.p = torch.tensor([world.p[text] for text in order])
        self.q = torch.tensor([world.q[text] for text in order])
        self.stops = torch.tensor([world.stops(text) for text in order])

    def number(self, text: tuple[int, ...]) -> int:
        """0 for the prompt; a text's continuation by token t has number * V + t + 1."""
        number = 0
        for token in text:
            number = number * self.world.vocab + token + 1
        return number

    def draft(self, rows: int, branching: tuple[int, ...], drawn: bool, peek: float = 0.0) -> tuple[DraftTree, Tensor]:
        """A batch of drafts, ragged where the world stops them; p after each node (B, N, V).

        With `peek`, drawn tokens that the draft itself finds less likely than that are taken back: the forbidden thing.
        """
        V = self.world.vocab
        tokens = torch.zeros(rows, 1, dtype=torch.long)
        texts = torch.zeros(rows, 1, dtype=torch.long)  # numbers
        parents = torch.full((rows, 1), -1)
        valid = torch.ones(rows, 1, dtype=torch.bool)
        level = [0]
        for width in branching:
            below = []
            for node in level:
                q = self.q[texts[:, node]]
                order = q.log()
                if drawn:  # Gumbel top-k: successive draws without replacement
                    order = order - torch.empty_like(q).exponential_().log()
                best = order.topk(min(width, V), -1)
                for k in range(best.indices.shape[1]):
                    token = best.indices[:, k]
                    q_x = q.gather(1, token[:, None])[:, 0]
                    fits = valid[:, node] & ~self.stops[texts[:, node]] & best.values[:, k].isfinite() & (q_x >= peek)
                    below.append(tokens.shape[1])
                    tokens = torch.cat([tokens, torch.where(fits, token, 0)[:, None]], 1)
                    texts = torch.cat([texts, torch.where(fits, texts[:, node] * V + token + 1, 0)[:, None]], 1)
                    parents = torch.cat([parents, torch.where(fits, node, -1)[:, None]], 1)
                    valid = torch.cat([valid, fits[:, None]], 1)
            level = below
        probs = None
        if drawn:
            has_child = (parents[:, None, :] == torch.arange(tokens.shape[1])[:, None]).any(-1)
            probs = self.q[texts] * (has_child & valid)[..., None]
        return DraftTree(tokens, parents, probs, chain=max(branching) == 1), self.p[texts]

    def complete(self, result: RoundResult, tree: DraftTree) -> Tensor:
        """(B, length): what the result gave, continued by plain sampling from p."""
        text = torch.zeros(len(tree.tokens), dtype=torch.long)
        new, out = result.tokens, []
        for i in range(self.world.length):
            token = torch.multinomial(self.p[text], 1)[:, 0]
            if i < new.shape[1]:
                token = torch.where(i <= result.accepted, new[:, i], token)
            out.append(token)
            text = text * self.world.vocab + token + 1
        return torch.stack(out, 1)


def count(texts: Tensor, vocab: int) -> dict[tuple[int, ...], int]:
    """How often each text comes up among (B, T)."""
    T = texts.shape[1]
    code = (texts * vocab ** torch.arange(T - 1, -1, -1)).sum(-1)
    counts = code.bincount(minlength=vocab**T).tolist()
    return dict(zip(itertools.product(range(vocab), repeat=T), counts, strict=True))


WORLDS = {  # vocabulary and zeros of p and q
    "vocab 4": {"seed": 11, "vocab": 4},
    "vocab 5 with zeros": {"seed": 12, "vocab": 5, "zeros_p": 1, "zeros_q": 2},
    "vocab 3, q often right": {"seed": 13, "vocab": 3, "zeros_p": 1},
}


def measured(rule, branching, drawn, world: str, draws: int = DRAWS, **how) -> float:
    """How far a rule's texts are from the target's, in standard deviations."""
    tables = Tables(naive.random_world(length=len(branching) + 1, **WORLDS[world]))
    tree, probs = tables.draft(draws, branching, drawn, **how)
    texts = tables.complete(rule(tree, probs), tree)
    return naive.departure(count(texts, tables.world.vocab), tables.world.law())


EXPERIMENTS = {
    "speculative_sampling": [((1, 1), True), ((1, 1, 1), True)],
    "block_verification": [((1, 1), True), ((1, 1, 1), True)],
    "recursive_rejection": [((1, 1), True), ((2, 2), True), ((3, 1), True), ((3, 2), True)],
    "point_mass": [((1, 1), False), ((2, 2), False), ((3, 1), False), ((1, 1), True), ((2, 2), True)],
}
CASES = [
    pytest.param(
        rule,
        branching,
        drawn,
        id=f"{rule}, {'x'.join(map(str, branching))}, {'drawn' if drawn else 'top'}",
        marks=pytest.mark.slow if branching == (3, 2) or (rule == "point_mass" and drawn) else [],
    )
    for rule, cases in EXPERIMENTS.items()
    for branching, drawn in cases
]


@pytest.mark.parametrize(
    "world", [pytest.param(world, marks=[] if "zeros" in world else pytest.mark.slow) for world in WORLDS]
)
@pytest.mark.parametrize(("rule", "branching", "drawn"), CASES)
def test_leaves_the_distribution_as_it_is(rule, branching, drawn, world):
    assert measured(getattr(acceptance, rule), branching, drawn, world) < EXACT


def test_one_percent_would_be_seen():
    """What `DRAWS` draws and `EXACT` deviations can overlook in one cell, whatever its probability."""
    assert max(naive.limit(DRAWS, probability / 100) for probability in range(1, 100)) < 0.01


@pytest.mark.parametrize("branching", [(1, 1), (2, 2)])
def test_typical_changes_the_distribution(branching):
    assert measured(acceptance.typical, branching, True, "vocab 4", draws=50_000) > 10 * EXACT


@pytest.mark.parametrize("rule", ["speculative_sampling", "block_verification", "recursive_rejection"])
def test_taking_back_drawn_tokens_is_seen(rule):
    """No peeking: whether a token is drafted may not depend on its value."""
    assert measured(getattr(acceptance, rule), (1, 1), True, "vocab 4", peek=0.15) > 2 * EXACT


def test_block_accepts_more_in_the_fast_rules_too():
    tables = Tables(naive.random_world(length=4, **WORLDS["vocab 4"]))
    tree, probs = tables.draft(DRAWS, (1, 1, 1), True)
    token = acceptance.speculative_sampling(tree, probs).accepted.double().mean()
    block = acceptance.block_verification(tree, probs).accepted.double().mean()
    assert block > token + 0.05  # 0.91 against 0.84


def test_half_precision_probabilities_are_not_asked_for():
    """`(1 - w)` and residuals need float32; the rules keep the dtype they get."""
    tables = Tables(naive.random_world(length=3, **WORLDS["vocab 4"]))
    tree, probs = tables.draft(1000, (1, 1), True)
    for rule in (acceptance.speculative_sampling, acceptance.block_verification, acceptance.recursive_rejection):
        result = rule(DraftTree(tree.tokens, tree.parents, tree.probs.double(), chain=True), probs.double())
        assert result.next_token.dtype == torch.long


# The tests above can fail: rules broken on purpose are caught.

MUTANTS = {
    "speculative_sampling": {
        "u < p instead of p / q": ("u * q_x < p_x", "u < p_x"),
        "recovered token from p": ("_residual(probs[rows, accepted], q[rows, accepted])", "probs[rows, accepted]"),
        "recovered token from q": ("_residual(probs[rows, accepted], q[rows, accepted])", "q[rows, accepted] + 1e-9"),
        "counts tokens after a miss": ("accept.long().cumprod(-1).sum(-1)", "accept.long().sum(-1)"),
        "one accepted too few": (".sum(-1)  # (B,)", ".sum(-1).sub(1).clamp(min=0)  # (B,)"),
        "recovered token of the node before": ("probs[rows, accepted],", "probs[rows, accepted - 1],"),
        "padding may be accepted": (" & tree.valid[:, 1:]", ""),
        "bonus from the last residual": (
            "q[rows, accepted])",
            "torch.where(q[rows, accepted].any(-1, keepdim=True), q[rows, accepted], q[rows, accepted - 1]))",
        ),
    },
    "block_verification": {
        "weights above one": (".clamp(max=1.0)", ""),
        "h = w": ("mass / (mass + 1 - weight)", "weight"),
        "h without the missing mass": ("mass / (mass + 1 - weight)", "mass"),
        "weights do not multiply": ("(weight[:, i - 1] * ratio[:, i - 1])", "ratio[:, i - 1]"),
        "residual without the weight": ("_residual(w * probs", "_residual(probs"),
        "residual without subtraction": ("q[rows, accepted])", "torch.zeros_like(q[rows, accepted]))"),
        "mass without the weight": ("(weight[..., None] * probs)", "probs.clone()"),
        "first rejection ends the block": ("(taken * index).amax(-1)", "taken.long().cumprod(-1).sum(-1)"),
        "last h as everywhere": (".sub_(q)", ".sub_(torch.where(q.any(-1, keepdim=True), q, q.roll(1, 1)))"),
        "one accepted too few": ("(taken * index).amax(-1)", "((taken * index).amax(-1) - 1).clamp(min=0)"),
    },
    "recursive_rejection": {
        "q not renormalised between siblings": ("_normalised(q.scatter(1, token, 0.0))", "q.scatter(1, token, 0.0)"),
        "q keeps the rejected sibling": ("_normalised(q.scatter(1, token, 0.0))", "q"),
        "residual without subtraction": ("_normalised(_residual(p, q))", "p"),
        "residual not renormalised": ("_normalised(_residual(p, q))", "_residual(p, q)"),
        "residual loses the sibling only": ("_normalised(_residual(p, q))", "_normalised(p.scatter(1, token, 0.0))"),
        "u < p instead of p / q": ("torch.rand_like(q_x) * q_x <", "torch.rand_like(q_x) <"),
        "p of the parent after a step": ("p = torch.where(moved, probs[rows, node], p)", "p = p"),
        "q of the parent after a step": ("q = torch.where(moved, q_all[rows, node], q)", "q = q"),
        "siblings tried after one was taken": (" & (accepted == depth - 1)", ""),
        "siblings tried from the last": ("children[rows, stays, c]", "children.flip(2)[rows, stays, c]"),
    },
    "longest_accepted_path": {
        "recovered token of the root": ("choice.gather(1, last[:, None])[:, 0]", "choice[:, 0]"),
        "chain counts hits after a miss": ("hits.long().cumprod(-1).sum(-1)", "hits.long().sum(-1)"),
        "chain: recovered token of the node before": (
            "choice.gather(1, accepted[:, None])",
            "choice.roll(1, 1).gather(1, accepted[:, None])",
        ),
        "chain: one accepted too few": (
            "hits.long().cumprod(-1).sum(-1)",
            "(hits.long().cumprod(-1).sum(-1) - 1).clamp(min=0)",
        ),
        "chain: hits the wrong node": ("choice[:, :-1]", "choice[:, :1]"),
        "misses above a node do not count": ("(tree.ancestors & missed[:, None]).any(-1)", "missed"),
        "the root's choice everywhere": ("choice.gather(1, tree.parents.clamp(min=0))", "choice[:, :1]"),
    },
    "sample": {
        "weights flattened": ("probs.cumsum(-1)", "probs.sqrt().cumsum(-1)"),
        "argmax": ("torch.searchsorted(cdf, threshold[..., None], right=True)[..., 0]", "probs.argmax(-1)"),
        "one token further": ("right=True)[..., 0]", "right=True)[..., 0].add(1).clamp(max=probs.shape[-1] - 1)"),
        "total taken for one": ("u * total,", "u,"),
    },
    "_residual": {
        "absolute difference": (".clamp_(min=0)", ".abs_()"),
        "the wrong way round": ("residual = (p - q)", "residual = (q - p)"),
    },
}


def mutant(function: str, old: str, new: str) -> types.ModuleType:
    """`specdec.sampling.acceptance` with one change in the text of one function."""
    whole, part = inspect.getsource(acceptance), inspect.getsource(getattr(acceptance, function))
    assert part.count(old) == 1, f"{function} no longer reads {old!r}: write this mutant anew"
    module = types.ModuleType("mutant")
    exec(compile(whole.replace(part, part.replace(old, new)), "mutant", "exec"), module.__dict__)
    return module


@pytest.mark.parametrize(
    ("function", "old", "new"),
    [
        pytest.param(function, old, new, id=f"{function}: {name}")
        for function, changes in MUTANTS.items()
        for name, (old, new) in changes.items()
    ],
)
def test_a_broken_rule_is_caught(function, old, new):
    module = mutant(function, old, new)
    users = {
        "longest_accepted_path": ["point_mass"],
        "sample": list(EXPERIMENTS),
        "_residual": ["speculative_sampling"],
    }
    for draws in (30_000, DRAWS):  # most show at once
        for rule in users.get(function, [function]):
            for (branching, drawn), world in itertools.product(EXPERIMENTS[rule], WORLDS):
                try:
                    if measured(getattr(module, rule), branching, drawn, world, draws) > 1.2 * EXACT:
                        return
                except (IndexError, RuntimeError):  # a token past the vocabulary, a distribution without mass
                    return
    pytest.fail("the change went unnoticed")
