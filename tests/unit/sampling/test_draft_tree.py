"""`DraftTree` and `RoundResult` against plain Python, on any tree there is."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.sampling import acceptance
from specdec.sampling.draft_tree import DraftTree
from specdec.sampling.dynamic_tree import Candidates, DynamicTree
from specdec.sampling.results import RoundResult
from tests.support import naive

VOCAB = 7


@st.composite
def rows(draw: st.DrawFn, most: int = 9) -> list[naive.Tree]:
    """A batch of single-row trees; any node may be padding, and so is everything below it."""
    B, N = draw(st.integers(1, 4)), draw(st.integers(1, most))
    batch = []
    for _ in range(B):
        parents = [-1]
        for node in range(1, N):
            choices = [-1] + [n for n in range(node) if n == 0 or parents[n] >= 0]
            parents.append(draw(st.sampled_from(choices)))
        batch.append(naive.Tree(draw(st.lists(st.integers(0, VOCAB - 1), min_size=N, max_size=N)), parents))
    return batch


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[list[int]], int]:
    """Drafted tokens of each row, and the width K of the batch."""
    K = draw(st.integers(1, 6))
    token = st.integers(0, VOCAB - 1)
    return draw(st.lists(st.lists(token, max_size=K), min_size=1, max_size=4)), K


def as_draft(batch: list[naive.Tree]) -> DraftTree:
    return DraftTree(torch.tensor([tree.tokens for tree in batch]), torch.tensor([tree.parents for tree in batch]))


def on_path(tree: naive.Tree, node: int) -> list[bool]:
    path = tree.path(node) if tree.parents[node] >= 0 or node == 0 else [node]  # padding sees itself
    return [n in path for n in range(len(tree.tokens))]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(rows())
def test_shape_as_in_plain_python(batch):
    draft = as_draft(batch)
    B, N = len(batch), len(batch[0].tokens)
    assert draft.size == N
    assert draft.ancestors.shape == (B, N, N)
    assert draft.ancestors.dtype == torch.bool
    assert draft.depth.shape == (B, N)
    for b, tree in enumerate(batch):
        real = set(tree.nodes)
        assert draft.valid[b].tolist() == [n in real for n in range(N)]
        assert draft.ancestors[b].tolist() == [on_path(tree, n) for n in range(N)]
        assert draft.depth[b].tolist() == [tree.depth(n) if n in real else 0 for n in range(N)]
        children = draft.children()[b]
        for n in range(N):
            expected = tree.children(n)
            assert children[n].tolist() == expected + [-1] * (children.shape[1] - len(expected))
    widest = max(len(tree.children(n)) for tree in batch for n in tree.nodes)
    assert draft.children().shape == (B, N, max(1, widest))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(rows(), st.randoms(use_true_random=False))
def test_following_and_new_tokens_as_in_plain_python(batch, random):
    """`longest_accepted_path` follows the target's choices; `new_tokens` are the path's tokens and the next one."""
    draft = as_draft(batch)
    choice = [[random.randrange(VOCAB) for _ in tree.tokens] for tree in batch]
    for tree, wanted in zip(batch, choice, strict=True):  # let many of them hit
        for node in tree.nodes[1:]:
            if random.random() < 0.6:
                wanted[tree.parents[node]] = tree.tokens[node]
    result = acceptance.longest_accepted_path(draft, torch.tensor(choice))
    new = result.tokens
    assert result.path.shape == new.shape
    for b, (tree, wanted) in enumerate(zip(batch, choice, strict=True)):
        one_hot = [[float(token == want) for token in range(VOCAB)] for want in wanted]
        path, token = naive.greedy(tree, one_hot)
        accepted = int(result.accepted[b])
        assert accepted == len(path) - 1 < result.path.shape[1]
        assert result.path[b, : len(path)].tolist() == list(path)
        assert result.path[b, len(path) :].tolist() == list(range(len(path), result.path.shape[1]))
        assert new[b, : accepted + 1].tolist() == [tree.tokens[n] for n in path[1:]] + [token]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(chains(), st.booleans())
def test_from_chain_as_in_plain_python(drafted, drawn):
    drafts, K = drafted
    B = len(drafts)
    padded = torch.tensor([row + [0] * (K - len(row)) for row in drafts])
    q = torch.rand(B, K, VOCAB) + 0.1 if drawn else None
    keys = torch.arange(1, 1 + B * K).view(B, K)
    root = torch.arange(B)
    draft = DraftTree.from_chain(root, padded, torch.tensor([len(row) for row in drafts]), q, keys)
    assert draft.chain
    assert draft.tokens.tolist() == torch.cat([root[:, None], padded], 1).tolist()
    assert draft.confidence_bins.tolist() == [[0, *row] for row in keys.tolist()]
    for b, row in enumerate(drafts):
        n = len(row)
        assert draft.parents[b].tolist() == list(range(-1, n)) + [-1] * (K - n)
        assert draft.depth[b].tolist() == list(range(n + 1)) + [0] * (K - n)
        assert draft.valid[b].tolist() == [True] * (n + 1) + [False] * (K - n)
        if q is None:
            assert draft.probs is None
        else:
            assert torch.equal(draft.probs[b, :n], q[b, :n])
            assert not draft.probs[b, n:].any()  # nothing drawn at the row's last node, nor behind it


def test_from_chain_without_lengths_is_full():
    q = torch.rand(2, 3, VOCAB)
    draft = DraftTree.from_chain(torch.tensor([5, 6]), torch.tensor([[1, 2, 3], [4, 5, 6]]), probs=q)
    assert draft.tokens.tolist() == [[5, 1, 2, 3], [6, 4, 5, 6]]
    assert draft.parents.tolist() == [[-1, 0, 1, 2]] * 2
    assert torch.equal(draft.probs[:, :-1], q)
    assert not draft.probs[:, -1].any()


@pytest.mark.parametrize("size", [1, 2, 3, 5, 9, 17, 33, 64])
def test_ancestors_of_a_long_chain(size):
    """The squaring in `ancestors` reaches the whole way, at powers of two and beside them."""
    draft = DraftTree.from_chain(torch.tensor([0]), torch.zeros(1, size - 1, dtype=torch.long))
    assert torch.equal(draft.ancestors[0], torch.ones(size, size).tril().bool())
    assert draft.depth[0].tolist() == list(range(size))


def test_root_only():
    draft = DraftTree.root_only(torch.tensor([3, 4]))
    assert (draft.tokens.tolist(), draft.parents.tolist()) == ([[3], [4]], [[-1], [-1]])
    assert (draft.size, draft.chain, draft.probs) == (1, True, None)
    assert draft.valid.all()
    assert draft.ancestors.tolist() == [[[True]]] * 2
    assert draft.depth.tolist() == [[0], [0]]
    assert draft.children().tolist() == [[[-1]], [[-1]]]


def test_valid_does_not_write_into_the_parents():
    draft = DraftTree.root_only(torch.tensor([3]))
    assert draft.valid.all()
    assert draft.parents.tolist() == [[-1]]


@pytest.mark.parametrize(
    ("tokens", "parents"),
    [
        pytest.param(torch.zeros(2, 3), torch.zeros(2, 2), id="widths differ"),
        pytest.param(torch.zeros(3), torch.zeros(3), id="no batch dimension"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(tokens: Tensor, parents: Tensor):
    with pytest.raises(ValueError, match=r"the same shape \(B, N\)"):
        DraftTree(tokens.long(), parents.long())


@pytest.mark.parametrize(
    ("path", "accepted", "next_token", "expected"),
    [
        pytest.param([0, 1, 2], 0, 9, [9], id="nothing accepted"),
        pytest.param([0, 2, 2], 1, 9, [12, 9], id="one node of a tree"),
        pytest.param([0, 2, 3], 2, 9, [12, 13, 9], id="the whole path"),
    ],
)
def test_new_tokens_by_hand(path, accepted, next_token, expected):
    tree = DraftTree(torch.tensor([[10, 11, 12, 13]]), torch.tensor([[-1, 0, 0, 2]]))
    result = RoundResult.of(tree, torch.tensor([path]), torch.tensor([accepted]), torch.tensor([next_token]))
    assert result.tokens[0, : accepted + 1].tolist() == expected


# Dynamic trees


def log_probs_after(row: int, path: tuple[int, ...]) -> Tensor:
    """(VOCAB,) what a random model of `row` says after a path: all different."""
    generator = torch.Generator().manual_seed(hash((row, path)) % 2**31)
    return torch.randn(VOCAB, generator=generator).mul(2).log_softmax(-1)


def naively_grown(row: int, depth: int, top_k: int, most: int, budget: int) -> list[tuple[int, ...]]:
    """EAGLE-2's tree as paths, the most probable first."""
    pool: dict[tuple[int, ...], float] = {}
    level: dict[tuple[int, ...], float] = {(): 0.0}
    for _ in range(depth):
        frontier = sorted(level, key=lambda path: -level[path])[:top_k]
        parents, level = level, {}
        for path in frontier:
            top = log_probs_after(row, path).topk(top_k)
            for score, token in zip(top.values.tolist(), top.indices.tolist(), strict=True):
                level[(*path, token)] = parents[path] + score
        pool |= level
    fitting = [path for path in pool if len(path) <= budget]
    return sorted(fitting, key=lambda path: -pool[path])[:most]


@settings(max_examples=40, deadline=None)
@given(
    depth=st.integers(1, 4),
    top_k=st.integers(1, 4),
    most=st.integers(1, 12),
    budget=st.lists(st.integers(0, 5), min_size=1, max_size=3),
)
def test_dynamic_trees_are_the_naive_ones(depth, top_k, most, budget):
    B = len(budget)

    def children(paths: list[list[tuple[int, ...]]]) -> tuple[Tensor, Tensor]:
        tops = [[log_probs_after(b, path).topk(top_k) for path in row] for b, row in enumerate(paths)]
        return (
            torch.stack([torch.stack([top.indices for top in row]) for row in tops]),
            torch.stack([torch.stack([top.values for top in row]) for row in tops]),
        )

    candidates = Candidates.of_root(*children([[()]] * B))
    for _ in range(depth - 1):
        nodes, parents = candidates.frontier(top_k)
        if parents is not None:
            expanded = candidates.expanded_nodes.gather(1, parents)
            assert expanded.tolist() == candidates.parents.gather(1, nodes).tolist()
        paths = [
            [path_to(candidates.tokens[b].tolist(), candidates.parents[b].tolist(), node) for node in row]
            for b, row in enumerate(nodes.tolist())
        ]
        candidates = candidates.expanded(nodes, *children(paths))
    ranking = candidates.ranked(most, torch.tensor(budget))
    root = torch.full((B,), 6)
    size = ranking.nodes.shape[1]
    draft, steps = ranking.tree(root, size), ranking.steps(size)
    assert draft.tokens[:, 0].tolist() == [6] * B
    for b in range(B):
        tokens, parents = draft.tokens[b].tolist(), draft.parents[b].tolist()
        nodes = [n for n in range(1, draft.size) if parents[n] >= 0]
        assert all(parents[n] < n for n in nodes)
        ours = [path_to(tokens, [-1 if p == 0 else p for p in parents], n) for n in nodes]
        assert ours == naively_grown(b, depth, top_k, most, budget[b])
        for n, path in zip(nodes, ours, strict=True):
            probability = sum(float(log_probs_after(b, path[:i])[path[i]]) for i in range(len(path)))
            assert float(ranking.probabilities()[b, n - 1].log()) == pytest.approx(probability, abs=1e-4)
            step = int(steps[b, n])
            if step >= 0:
                place = int(candidates.expanded_nodes[b, step])
                assert path_to(candidates.tokens[b].tolist(), candidates.parents[b].tolist(), place) == path


def path_to(tokens: list[int], parents: list[int], node: int) -> tuple[int, ...]:
    return (*(path_to(tokens, parents, parents[node]) if parents[node] >= 0 else ()), tokens[node])


@pytest.mark.parametrize("wrong", [{"depth": 0}, {"top_k": 0}, {"size": 1}])
def test_a_dynamic_tree_that_cannot_be(wrong):
    with pytest.raises(ValueError, match="a tree needs"):
        DynamicTree(**wrong)


OLD_NAMES = {
    "DraftTree(keys=...)": lambda tree, bins: DraftTree(tree.tokens, tree.parents, chain=True, keys=bins),
    "DraftTree.from_chain(keys=...)": lambda tree, bins: DraftTree.from_chain(
        tree.tokens[:, 0], tree.tokens[:, 1:], keys=bins[:, 1:]
    ),
    "replace(keys=...)": lambda tree, bins: replace(tree, keys=bins),
}


@pytest.mark.parametrize("name", OLD_NAMES)
def test_confidence_bins_under_their_old_name(name):
    """For one release, with one warning at the caller's line."""
    tree, bins = DraftTree.from_chain(torch.tensor([5]), torch.tensor([[7, 8]])), torch.tensor([[0, 3, 4]])
    said = name.replace("replace(", "DraftTree(")
    with pytest.warns(DeprecationWarning, match=" is now ") as caught:
        made = OLD_NAMES[name](tree, bins)
    assert [str(warning.message) for warning in caught] == [f"{said} is now {said.replace('keys', 'confidence_bins')}"]
    assert caught[0].filename == __file__
    assert made.confidence_bins.tolist() == bins.tolist()
    with pytest.warns(DeprecationWarning, match=r"DraftTree\.keys is now DraftTree\.confidence_bins") as caught:
        assert made.keys is made.confidence_bins
    assert [warning.filename for warning in caught] == [__file__]


def test_the_new_names_do_not_warn(recwarn):
    tree = DraftTree.from_chain(torch.tensor([5]), torch.tensor([[7, 8]]), confidence_bins=torch.tensor([[3, 4]]))
    assert replace(tree.first(2), levels=1).up_to_depth(1).confidence_bins.tolist() == [[0, 3]]
    assert not recwarn.list
