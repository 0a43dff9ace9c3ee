"""The verification rules: which path of a draft tree is accepted, and which token follows it.

Pure functions of tensors, independent of models and caches. Terms:

- p: the target's distribution after a node; q: the draft's distribution that the node's children were drawn from.
- point mass: a draft token chosen deterministically, so that q is one for it.
- bonus token: the token after a fully accepted path; recovered token: the token after a rejection.
- B rows, N nodes, V vocabulary size, D path length (root included).

`sequential_acceptance` follows choices that are made one node after the other.

| draft | rule | source |
|---|---|---|
| any | `longest_accepted_path` | the target's own choices: argmax, or argmax under exponential noise (`noise.Noise`) |
| deterministic, T > 0 | `point_mass` | Leviathan et al. 2211.17192 with q a point mass |
| drawn chain | `speculative_sampling` | Leviathan et al. 2211.17192, Chen et al. 2302.01318 |
| drawn chain | `block_verification` | Sun et al. 2403.10444, algorithm 2 |
| drawn tree | `recursive_rejection` | SpecInfer 2305.09781, Sequoia 2402.12374 (without replacement) |
| any (lossy) | `typical` | Medusa 2401.10774, section 2.3.1 |
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.sampling.draft_tree import DraftTree
from specdec.sampling.results import RoundResult


def sample(probs: Tensor) -> Tensor:
    """Draw one index per distribution, on CPUs by inverting its cumulative sum.

    This is faster than `torch.multinomial`, which draws V exponentials per row: 0.6 instead of 25 ms for 8 rows of 152k
    on two CPU cores. On GPUs a cumulative sum may fall by rounding, so exponentials are drawn there, too.

    Args:
        probs: (..., V) float, non-negative, need not sum to one.

    Returns:
        (...) int64. An index of probability zero is never drawn.

    Examples:
        >>> sample(torch.tensor([[0.0, 2.0, 0.0], [0.0, 0.0, 0.5]]))
        tensor([1, 2])
    """
    if probs.device.type != "cpu":
        return (probs / torch.empty_like(probs).exponential_()).argmax(-1)
    cdf = probs.cumsum(-1)
    u = torch.rand(probs.shape[:-1], device=probs.device, dtype=cdf.dtype)
    # u < 1, but u * total may round up to total, which would draw an index past the support.
    total = cdf[..., -1]
    threshold = torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, threshold[..., None], right=True)[..., 0]


def longest_accepted_path(tree: DraftTree, choice: Tensor) -> RoundResult:
    """The longest path from the root on which every node carries the token that the target chose after its parent.

    Args:
        tree: the draft.
        choice: (B, N) int64, the token that the target chose after each node.

    Examples:
        >>> tree = DraftTree(tokens=torch.tensor([[1, 2, 3, 4]]), parents=torch.tensor([[-1, 0, 0, 2]]))
        >>> result = longest_accepted_path(tree, torch.tensor([[3, 9, 4, 5]]))
        >>> result.path, result.accepted, result.next_token
        (tensor([[0, 2, 3]]), tensor([2]), tensor([5]))
    """
    if tree.chain:
        hits = (tree.tokens[:, 1:] == choice[:, :-1]) & (tree.parents[:, 1:] >= 0)  # (B, N - 1)
        accepted = hits.long().cumprod(-1).sum(-1)  # (B,) leading hits
        return _of_chain(tree, accepted, choice.gather(1, accepted[:, None])[:, 0])
    index = torch.arange(tree.size, device=choice.device)
    wanted = choice.gather(1, tree.parents.clamp(min=0))  # (B, N) the target's token after each node's parent
    siblings = tree.parents[:, :, None] == tree.parents[:, None]  # (B, N, N)
    again = siblings & (tree.tokens[:, :, None] == tree.tokens[:, None]) & (index < index[:, None])
    # The first of equal siblings counts.
    missed = ((tree.tokens != wanted) | (tree.parents < 0) | again.any(-1)) & (index > 0)
    lost = (tree.ancestors & missed[:, None]).any(-1)
    accepted, last = tree.depth.masked_fill(lost, -1).max(-1)  # the others form one path: its end is unique
    return RoundResult.of(tree, _path_to(tree, last), accepted, choice.gather(1, last[:, None])[:, 0])


def _path_to(tree: DraftTree, node: Tensor) -> Tensor:
    """(B, D) int64: the nodes from the root to each row's node (B,), then each column's own index."""
    B, N = tree.tokens.shape
    D, index = tree.height + 1, torch.arange(max(N, tree.height + 2), device=node.device)
    on_path = tree.ancestors.gather(1, node[:, None, None].expand(-1, 1, N))[:, 0]  # (B, N)
    places = torch.where(on_path, tree.depth, D)  # nodes off the path go to an extra last column, which is dropped
    return index[: D + 1].repeat(B, 1).scatter(1, places, index[:N].expand(B, -1))[:, :D]


def point_mass(tree: DraftTree, probs: Tensor) -> RoundResult:
    """Verify a deterministic draft at T > 0: sample the target at every node and follow the samples.

    Lossless. Rejection sampling accepts child x with p(x), else zeroes p(x), renormalises and tries the next child.
    Sampling from p and looking for the sample among the children has the same distribution, in one step.

    Args:
        tree: the draft.
        probs: (B, N, V) float32, p after each node.

    Examples:
        >>> tree = DraftTree.from_chain(torch.tensor([1]), torch.tensor([[2, 3]]))
        >>> probs = torch.eye(5)[torch.tensor([[2, 4, 0]])]  # a target that is sure of 2, then of 4
        >>> result = point_mass(tree, probs)
        >>> result.accepted, result.next_token
        (tensor([1]), tensor([4]))
    """
    return longest_accepted_path(tree, sample(probs))


def speculative_sampling(tree: DraftTree, probs: Tensor) -> RoundResult:
    """Verify a drawn chain token by token: accept x with min(1, p(x) / q(x)), resample a rejected one from (p - q)+.

    Lossless by Leviathan et al. (2211.17192, theorem 3.5).

    Args:
        tree: the draft, a chain with `probs`.
        probs: (B, N, V) float32, p after each node.

    Raises:
        ValueError: the tree has no `probs`.

    Examples:
        >>> q = torch.eye(5)[torch.tensor([[2, 3]])]
        >>> tree = DraftTree.from_chain(torch.tensor([1]), torch.tensor([[2, 3]]), probs=q)
        >>> result = speculative_sampling(tree, torch.eye(5)[torch.tensor([[2, 4, 0]])])
        >>> result.accepted, result.next_token
        (tensor([1]), tensor([4]))
    """
    q = _drawn(tree)
    p_x, q_x = _of_drafted(tree, probs), _of_drafted(tree, q)  # (B, N - 1)
    u = torch.rand_like(p_x)
    accept = (u * q_x < p_x) & tree.valid[:, 1:]  # u < p / q without the division by zero
    accepted = accept.long().cumprod(-1).sum(-1)  # (B,)
    # q is zero where nothing was drawn, so after a full acceptance the residual is p, which gives the bonus token.
    rows = torch.arange(len(probs), device=probs.device)
    return _of_chain(tree, accepted, sample(_residual(probs[rows, accepted], q[rows, accepted])))


def block_verification(tree: DraftTree, probs: Tensor) -> RoundResult:
    """Verify a drawn chain as one block. Accepts at least as many tokens in expectation as `speculative_sampling`.

    Lossless and optimal by Sun et al. (2403.10444, theorems 1 and 2). With w_i = min(1, w_{i-1} p(x_i) / q(x_i)) and
    S_i = sum (w_i p - q)+, prefix i is accepted with h_i = S_i / (S_i + 1 - w_i). The longest accepted prefix counts.

    Args:
        tree: the draft, a chain with `probs`.
        probs: (B, N, V) float32, p after each node.

    Raises:
        ValueError: the tree has no `probs`.

    Examples:
        >>> q = torch.eye(5)[torch.tensor([[2, 3]])]
        >>> tree = DraftTree.from_chain(torch.tensor([1]), torch.tensor([[2, 3]]), probs=q)
        >>> result = block_verification(tree, torch.eye(5)[torch.tensor([[2, 3, 4]])])
        >>> result.accepted, result.next_token
        (tensor([2]), tensor([4]))
    """
    q = _drawn(tree)
    B, N = tree.tokens.shape
    p_x, q_x = _of_drafted(tree, probs), _of_drafted(tree, q)  # (B, N - 1)
    ratio = torch.where(tree.valid[:, 1:], p_x / q_x.clamp(min=torch.finfo(q.dtype).tiny), torch.zeros_like(p_x))
    weight = torch.ones(B, N, device=probs.device, dtype=probs.dtype)  # w_i, one at the root
    for i in range(1, N):
        weight[:, i] = (weight[:, i - 1] * ratio[:, i - 1]).clamp(max=1.0)
    # At a row's last node q is zero, so S = w and h = w / (w + 1 - w) = w, the paper's separate last case.
    mass = (weight[..., None] * probs).sub_(q).clamp_(min=0).sum(-1)  # (B, N) S_i
    h = mass / (mass + 1 - weight)
    u = torch.rand_like(h)
    taken = ((u < h) & tree.valid)[:, 1:]  # (B, N - 1)
    index = torch.arange(1, N, device=probs.device)
    accepted = (taken * index).amax(-1) if N > 1 else torch.zeros(B, dtype=torch.long, device=probs.device)
    rows = torch.arange(B, device=probs.device)
    w = weight[rows, accepted][:, None]
    return _of_chain(tree, accepted, sample(_residual(w * probs[rows, accepted], q[rows, accepted])))


def recursive_rejection(tree: DraftTree, probs: Tensor) -> RoundResult:
    """Verify a drawn tree: try each node's children in the order in which they were drawn without replacement.

    Child x is accepted with min(1, p(x) / q(x)). After a rejection p becomes norm((p - q)+). x is removed from q, which
    is renormalised: the next sibling was drawn from this distribution. On a chain this is `speculative_sampling`.
    Lossless by Sequoia (2402.12374, theorem 3.3).

    Args:
        tree: the draft, with `probs`.
        probs: (B, N, V) float32, p after each node.

    Raises:
        ValueError: the tree has no `probs`.

    Examples:
        >>> q = torch.tensor([[[0.0, 0.0, 0.5, 0.5], [0.0] * 4, [0.0] * 4]])  # the root's children: 2, then 3
        >>> tree = DraftTree(torch.tensor([[1, 2, 3]]), torch.tensor([[-1, 0, 0]]), q)
        >>> result = recursive_rejection(tree, torch.eye(4)[torch.tensor([[3, 0, 1]])])
        >>> result.path, result.accepted, result.next_token
        (tensor([[0, 2]]), tensor([1]), tensor([1]))
    """
    q_all = _drawn(tree)
    B = len(probs)
    rows = torch.arange(B, device=probs.device)
    children = tree.children()  # (B, N, C)
    path = torch.arange(tree.height + 1, device=probs.device).repeat(B, 1)  # (B, D)
    node = torch.zeros(B, dtype=torch.long, device=probs.device)
    accepted = torch.zeros_like(node)
    p, q = probs[rows, node], q_all[rows, node]  # (B, V)
    for depth in range(1, path.shape[1]):
        reached = accepted == depth - 1  # rows that accepted a child at the last depth
        stays = node
        for c in range(children.shape[2]):
            child = children[rows, stays, c]  # (B,)
            considered = reached & (child >= 0) & (accepted == depth - 1)
            token = tree.tokens[rows, child.clamp(min=0)][:, None]  # (B, 1)
            q_x = q.gather(1, token)[:, 0]
            accept = considered & (torch.rand_like(q_x) * q_x < p.gather(1, token)[:, 0])
            reject = considered & ~accept
            node = torch.where(accept, child, node)
            accepted = accepted + accept
            path[:, depth] = torch.where(accept, child, path[:, depth])
            residual = _normalised(_residual(p, q))
            p = torch.where(reject[:, None], residual, p)
            left = _normalised(q.scatter(1, token, 0.0))
            q = torch.where(reject[:, None], left, q)
        moved = (accepted == depth)[:, None]
        p = torch.where(moved, probs[rows, node], p)
        q = torch.where(moved, q_all[rows, node], q)
    # A row that stopped has tried all children of its node: p is now the residual after them.
    return RoundResult.of(tree, path, accepted, sample(p))


def typical(tree: DraftTree, probs: Tensor, epsilon: float = 0.09, delta: float = 0.3) -> RoundResult:
    """Accept typical tokens: p(x) >= min(epsilon, delta * exp(-entropy(p))). LOSSY.

    Accepts the longest typical path and samples the token after it. The output is not distributed as the target's: its
    text is more probable than that of plain sampling. Rule and defaults are Medusa's (2401.10774, section 2.3.1).

    Args:
        tree: the draft.
        probs: (B, N, V) float32, p after each node.
        epsilon: hard threshold.
        delta: scale of the entropy-dependent threshold.

    Examples:
        >>> tree = DraftTree.from_chain(torch.tensor([1]), torch.tensor([[2, 3]]))
        >>> result = typical(tree, torch.tensor([[[0.0, 0.0, 0.2, 0.8], [0.0, 0.0, 1.0, 0.0], [0.25] * 4]]))
        >>> result.accepted, result.next_token
        (tensor([1]), tensor([2]))
    """
    B = len(probs)
    rows = torch.arange(B, device=probs.device)
    entropy = -torch.special.xlogy(probs, probs).sum(-1)  # (B, N)
    threshold = (delta * (-entropy).exp()).clamp(max=epsilon)
    parent = tree.parents.clamp(min=0)
    p_x = probs[rows[:, None], parent, tree.tokens]  # (B, N) p of each node after its parent
    typical_ = (p_x >= threshold.gather(1, parent)) & tree.valid
    typical_[:, 0] = True
    whole = (tree.ancestors <= typical_[:, None, :]).all(-1) & tree.valid  # the node and all its ancestors are typical
    last = torch.where(whole, tree.depth, -1).argmax(-1)  # (B,) deepest node of a typical path
    accepted = tree.depth[rows, last]
    return RoundResult.of(tree, _path_to(tree, last), accepted, sample(probs[rows, last]))


def _drawn(tree: DraftTree) -> Tensor:
    if tree.probs is None:
        raise ValueError("this rule needs the draft's distributions: DraftTree.probs is None (a deterministic draft)")
    return tree.probs


def _of_drafted(tree: DraftTree, probs: Tensor) -> Tensor:
    """(B, N - 1): the probability of each token of a chain by the distributions (B, N, V) after each node."""
    return probs[:, :-1].gather(-1, tree.tokens[:, 1:, None])[..., 0]


def _of_chain(tree: DraftTree, accepted: Tensor, next_token: Tensor) -> RoundResult:
    """The result of accepting the first `accepted` (B,) tokens of a chain."""
    path = torch.arange(tree.size, device=accepted.device).expand_as(tree.tokens)
    return RoundResult.of(tree, path, accepted, next_token)


def _residual(p: Tensor, q: Tensor) -> Tensor:
    """(p - q)+ over the last dimension; p where rounding made all of it zero."""
    residual = (p - q).clamp_(min=0)
    return torch.where(residual.sum(-1, keepdim=True) > 0, residual, p)


def _normalised(x: Tensor) -> Tensor:
    return x / x.sum(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
