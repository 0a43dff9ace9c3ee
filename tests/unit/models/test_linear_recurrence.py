"""Linear recurrences over trees, against the recurrence run along every path on its own."""

import pytest
import torch

from specdec.models.cache.convolution_window import Window, paths
from specdec.models.cache.linear_recurrence import Recurrence, Scan
from specdec.models.cache.recurrent_passes import Drafted, Taken

B, H, K, V = 2, 3, 4, 5
# Two trees of five nodes, and two more nodes below each.
PARENTS = [[-1, 0, 0, 1, 2], [-1, 0, 1, 1, 0]]
BELOW = [[3, 5], [4, 2]]
KINDS = {"gated delta rule": (1, True), "delta rule by channel": (K, True), "mamba2": (1, False)}


def path(parents, node):
    return [] if node < 0 else [*path(parents, parents[node]), node]


def seen(parents, new):
    """(B, new, M + new) bool, of the last `new` nodes."""
    nodes = torch.zeros(B, len(parents[0]), len(parents[0]), dtype=torch.bool)
    for b in range(B):
        for i in range(len(parents[b])):
            nodes[b, i, path(parents[b], i)] = True
    return nodes[:, -new:]


def sees(parents, new):
    step = Drafted(seen(parents, new))
    before = len(parents[0]) - new
    last = [[max([-1, *(j for j in path(p, i) if j < before)]) for i in range(before, len(p))] for p in parents]
    assert step.last is None if not before else step.last.tolist() == last
    return step


def one_by_one(state, nodes, x):
    """Read along one path: the outputs at its nodes, and the state after them. x: of one row and head."""
    read = []
    for i in nodes:
        state = x["g"][i].exp()[:, None] * state
        value = x["v"][i] if x["beta"] is None else x["beta"][i] * (x["v"][i] - x["k"][i] @ state)
        state = state + x["k"][i][:, None] * value
        read.append(x["q"][i] @ state)
    return read, state


def inputs(kind, count):
    channels, has_beta = KINDS[kind]
    return {
        "q": torch.randn(B, H, count, K),
        "k": torch.nn.functional.normalize(torch.randn(B, H, count, K), dim=-1),
        "v": torch.randn(B, H, count, V),
        "g": -torch.rand(B, H, count, channels),
        "beta": torch.rand(B, H, count, 1) if has_beta else None,
    }


def part(x, start, stop):
    return [None if x[name] is None else x[name][:, :, start:stop] for name in ("q", "k", "v", "g", "beta")]


def of(x, b, h):
    return {name: None if value is None else value[b, h] for name, value in x.items()}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_is_read_as_its_paths_one_by_one(kind, turned):
    torch.manual_seed(0)
    x, state = inputs(kind, 7), torch.randn(B, H, K, V)
    grown = [a + b for a, b in zip(PARENTS, BELOW, strict=True)]
    memory = Recurrence(state.mT.contiguous() if turned else state, turned)
    first = memory.read(sees(PARENTS, 5), *part(x, 0, 5))
    second = memory.read(sees(grown, 2), *part(x, 5, 7))
    read = torch.cat([first, second], 2)
    for b in range(B):
        for h in range(H):
            for node in range(7):
                expected, _ = one_by_one(state[b, h], path(grown[b], node), of(x, b, h))
                torch.testing.assert_close(read[b, h, node], expected[-1], atol=1e-5, rtol=1e-5)

    # Row 0 takes nodes 0 and 1 and keeps 3 and 5 waiting; row 1 takes nothing and keeps 0.
    taken = Taken(
        torch.tensor([[True, True, *[False] * 5], [False] * 7]),
        torch.tensor([[0, 1, 3, 5], [0, 1, 3, 3]]),
        torch.tensor([1, -1]),
        torch.tensor([[3, 5], [0, 0]]),
    )
    memory.take(taken)
    for h in range(H):
        expected = [one_by_one(state[0, h], [0, 1], of(x, 0, h))[1], state[1, h]]
        now = memory.state.mT if turned else memory.state
        torch.testing.assert_close(now[:, h], torch.stack(expected), atol=1e-5, rtol=1e-5)
    # One more token, behind what each row has.
    more = inputs(kind, 1)
    held = torch.tensor([[[True, True, True]], [[True, False, True]]])
    read = memory.read(Drafted(held), *part(more, 0, 1))
    both = {name: None if v is None else torch.cat([v, more[name]], 2) for name, v in x.items()}
    for h in range(H):
        for b, nodes in enumerate(([0, 1, 3, 5, 7], [0, 7])):
            expected, _ = one_by_one(state[b, h], nodes, of(both, b, h))
            torch.testing.assert_close(read[b, h, 0], expected[-1], atol=1e-5, rtol=1e-5)


def test_strong_decay_neither_overflows_nor_reaches_other_branches():
    x, state = inputs("mamba2", 5), torch.randn(B, H, K, V)
    x["g"] = x["g"] * 300
    memory = Recurrence(state, turned=False)
    assert memory.read(sees(PARENTS, 5), *part(x, 0, 5)).isfinite().all()
    nodes = torch.tensor([[True, False, True, False, False], [True, False, False, False, False]])
    line = torch.tensor([[0, 2], [0, 0]])
    memory.take(Taken(nodes, line, torch.tensor([2, 0]), torch.empty(B, 0, dtype=torch.long)))
    assert memory.state.isfinite().all()


def test_a_scan_keeps_the_state_after_each_node():
    torch.manual_seed(1)
    state, decay, added, query = (
        torch.randn(B, 6, 3),
        torch.rand(B, 7, 6, 3),
        torch.randn(B, 7, 6, 3),
        torch.randn(B, 7, 3),
    )
    grown = [a + b for a, b in zip(PARENTS, BELOW, strict=True)]
    scan = Scan(state)
    read = [scan.read(sees(PARENTS, 5), query[:, :5], decay[:, :5], added[:, :5])]
    read = torch.cat([*read, scan.read(sees(grown, 2), query[:, 5:], decay[:, 5:], added[:, 5:])], 1)
    after = {}
    for b in range(B):
        for node in range(7):
            now = state[b]
            for i in path(grown[b], node):
                now = decay[b, i] * now + added[b, i]
            after[b, node] = now
            torch.testing.assert_close(read[b, node], now @ query[b, node])
    nothing = torch.zeros(B, 7, dtype=torch.bool)  # a scan looks at the last node alone
    scan.take(Taken(nothing, nothing.long(), torch.tensor([3, -1]), torch.empty(B, 0, dtype=torch.long)))
    torch.testing.assert_close(scan.state, torch.stack([after[0, 3], state[1]]))


@pytest.mark.parametrize("width", [2, 3, 4])
def test_a_convolution_sees_a_nodes_own_last_inputs(width):
    """Windows of 4 inputs from before, numbered from -4; nodes by their numbers."""
    line = torch.arange(-4, 5).expand(B, 1, 9)
    columns = paths(seen(PARENTS, 5), 4, width)
    for b in range(B):
        for node in range(5):
            expected = [-4, -3, -2, -1, *path(PARENTS[b], node)][-width:]
            assert line[b, 0, columns[b, node]].tolist() == expected


def test_a_window_slides_over_what_is_taken():
    window = Window(torch.arange(-4.0, 0).expand(B, 1, 4))
    window.extend(torch.arange(5.0).expand(B, 1, 5))
    nodes = torch.tensor([[True, False, True, False, True], [False] * 5])
    line = torch.tensor([[0, 2, 4, 3], [0, 1, 3, 2]])
    window.take(Taken(nodes, line, torch.tensor([4, -1]), torch.tensor([[3], [0]])))
    assert window.state[:, 0].tolist() == [[-1, 0, 2, 4], [-4, -3, -2, -1]]
    assert window.extend(torch.full((B, 1, 1), 9.0))[:, 0, 4:].tolist() == [[3, 9], [0, 9]]
