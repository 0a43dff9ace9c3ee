"""The verification rules: which path of a draft tree is accepted, and which token follows it.

Pure functions on tensors; models and caches are unknown here. Words: p is the target's distribution after each node,
q the draft's from which the node's children were drawn, a *point mass* a draft chosen deterministically, the *bonus*
token the one that follows a fully accepted path, the *recovered* token the one that follows a rejection.
B rows, N nodes, V vocabulary, D path length (root included).

| draft | rule | source |
|---|---|---|
| any | `accept_sequentially` | the target's own choices: its argmax, or the winner of the column's race (`noise.Noise`) |
| deterministic, T > 0 | `point_mass` | Leviathan et al. 2211.17192 with q a point mass |
| drawn chain | `speculative_sampling` | Leviathan et al. 2211.17192, Chen et al. 2302.01318 |
| drawn chain | `block_verification` | Sun et al. 2403.10444, algorithm 2 |
| drawn tree | `recursive_rejection` | SpecInfer 2305.09781, Sequoia 2402.12374 (without replacement) |
| any (lossy) | `typical` | Medusa 2401.10774, section 2.3.1 |
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specdec.sampling.draft_tree import DraftTree
from specdec.sampling.results import Verdict


def sample(probs: Tensor) -> Tensor:
    """Draw one index per distribution by inverting its cumulative sum.

    Args:
        probs: (..., V) float, non-negative, need not sum to one.

    Returns:
        (...) int64. An index of probability zero is never drawn. (`torch.multinomial` draws V exponentials per
        row: 25 ms for 8 rows of 152k on two CPU cores where this takes 0.6.)
    """
    cdf = probs.cumsum(-1)
    u = torch.rand(probs.shape[:-1], device=probs.device, dtype=cdf.dtype)
    # u < 1, but u * total may round up to total: stay below it, or an index past the support would be drawn.
    total = cdf[..., -1]
    threshold = torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, threshold[..., None], right=True)[..., 0]


def accept_sequentially(
    tree: DraftTree,
    choose: Callable[[Tensor, Tensor], Tensor | None],
    alive: Tensor,
    go_on: Callable[[Tensor, Tensor], bool] | None = None,
) -> Verdict:
    """Go from the root to the child that carries the token that the target chooses, as long as there is one.

    Whatever was drafted, the tokens are the target's choices in their order; only reached nodes are asked about.

    Args:
        choose: from path (B, d + 1), the nodes from the root to each row's own, and alive (B,) bool, rows for which it
            matters, the target's token (B,) int64 there. None, not at the root: the walk ends one node before.
        alive: (B,) bool, rows that walk at all.
        go_on: asked with the path and the token (B,) before a child is entered; False ends the walk in front of it.
    """
    node = torch.zeros_like(tree.tokens[:, 0])
    accepted, next_token = node, node
    reached, places = [node], [node]
    looks = node.device.type == "cpu" or go_on is not None  # a look may wait for a device: not for speed alone
    for depth in range(1, tree.height + 2):
        path = torch.stack(reached, 1)
        token = choose(path, alive)
        if token is None:
            accepted = accepted - alive.long()
            del places[-1]
            break
        next_token = torch.where(alive, token, next_token)
        if depth > tree.height:
            break
        child = tree.child(node, token)
        alive = alive & (child >= 0)
        if (looks and not bool(alive.any())) or (go_on is not None and not go_on(path, token)):
            break
        node = torch.where(alive, child, node)
        accepted = accepted + alive
        reached.append(node)
        places.append(torch.where(alive, child, depth))
    return Verdict(torch.stack(places, 1), accepted, next_token)


def longest_accepted_path(tree: DraftTree, choice: Tensor) -> Verdict:
    """Walk from the root to the child whose token the target chose, as long as there is one.

    Args:
        choice: (B, N) int64, the token that the target chose after each node.
    """
    if tree.chain:
        hits = (tree.tokens[:, 1:] == choice[:, :-1]) & tree.valid[:, 1:]  # (B, N - 1)
        accepted = hits.long().cumprod(-1).sum(-1)  # (B,) leading hits
        path = torch.arange(tree.size, device=choice.device).expand_as(tree.tokens)
        return Verdict(path, accepted, choice.gather(1, accepted[:, None])[:, 0])
    index = torch.arange(tree.size, device=choice.device)
    wanted = choice.gather(1, tree.parents.clamp(min=0))  # (B, N) the target's token after each node's parent
    siblings = tree.parents[:, :, None] == tree.parents[:, None]  # (B, N, N)
    again = siblings & (tree.tokens[:, :, None] == tree.tokens[:, None]) & (index < index[:, None])
    # Of equal siblings the first counts.
    missed = ((tree.tokens != wanted) | (tree.parents < 0) | again.any(-1)) & (index > 0)
    reached = ~(tree.ancestors & missed[:, None]).any(-1)
    accepted, last = torch.where(reached, tree.depth, -1).max(-1)  # of reached nodes one is the deepest
    return Verdict(_path_to(tree, last), accepted, choice.gather(1, last[:, None])[:, 0])


def _path_to(tree: DraftTree, node: Tensor) -> Tensor:
    """(B, D) int64, the nodes from the root to each row's node (B,), then each column's own index."""
    B, N = tree.tokens.shape
    D, index = tree.height + 1, torch.arange(max(N, tree.height + 2), device=node.device)
    on_path = tree.ancestors.gather(1, node[:, None, None].expand(-1, 1, N))[:, 0]  # (B, N)
    places = torch.where(on_path, tree.depth, D)  # what is not on the path goes to a last column, and away
    return index[: D + 1].repeat(B, 1).scatter(1, places, index[:N].expand(B, -1))[:, :D]


def point_mass(tree: DraftTree, probs: Tensor) -> Verdict:
    """T > 0, deterministic draft: sample the target at every node and follow the samples.

    Accepting child x with p(x), else zeroing p(x), renormalising and trying the next child is sampling from p and
    looking the sample up among the children: the same distribution in one step, so the output's law is the target's.

    Args:
        probs: (B, N, V) float32, p after each node.
    """
    return longest_accepted_path(tree, sample(probs))


def speculative_sampling(tree: DraftTree, probs: Tensor) -> Verdict:
    """Drawn chain, token by token: accept x with min(1, p(x) / q(x)), resample a rejected one from (p - q)+.

    Lossless by Leviathan et al. (2211.17192, theorem 3.5). `probs` (B, N, V) float32.
    """
    q = _drawn(tree)
    B, N = tree.tokens.shape
    drafted = tree.tokens[:, 1:, None]  # (B, N - 1, 1)
    p_x = probs[:, :-1].gather(-1, drafted)[..., 0]  # (B, N - 1)
    q_x = q[:, :-1].gather(-1, drafted)[..., 0]
    u = torch.rand_like(p_x)
    accept = (u * q_x < p_x) & tree.valid[:, 1:]  # u < p / q without the division by zero
    accepted = accept.long().cumprod(-1).sum(-1)  # (B,)
    # q is zero where nothing was drawn, so after a full acceptance the residual is p itself: the bonus token.
    rows = torch.arange(B, device=probs.device)
    residual = _residual(probs[rows, accepted], q[rows, accepted])
    path = torch.arange(N, device=probs.device).expand(B, N)
    return Verdict(path, accepted, sample(residual))


def block_verification(tree: DraftTree, probs: Tensor) -> Verdict:
    """Drawn chain, the block as a whole: accepts at least as many tokens in expectation as token by token.

    Lossless and optimal by Sun et al. (2403.10444, theorems 1 and 2). With w_i = min(1, w_{i-1} p(x_i) / q(x_i)),
    prefix i is taken with h_i = S_i / (S_i + 1 - w_i), S_i = sum (w_i p - q)+, and the longest one taken counts.

    Args:
        probs: (B, N, V) float32.
    """
    q = _drawn(tree)
    B, N = tree.tokens.shape
    drafted = tree.tokens[:, 1:, None]
    p_x = probs[:, :-1].gather(-1, drafted)[..., 0]  # (B, N - 1)
    q_x = q[:, :-1].gather(-1, drafted)[..., 0]
    ratio = torch.where(tree.valid[:, 1:], p_x / q_x.clamp(min=torch.finfo(q.dtype).tiny), torch.zeros_like(p_x))
    weight = torch.ones(B, N, device=probs.device, dtype=probs.dtype)  # w_i, the root's is one
    for i in range(1, N):
        weight[:, i] = (weight[:, i - 1] * ratio[:, i - 1]).clamp(max=1.0)
    # At a row's last node q is zero, hence S = w, and h = w / (w + 1 - w) = w: the paper's separate last case.
    mass = (weight[..., None] * probs).sub_(q).clamp_(min=0).sum(-1)  # (B, N) S_i
    h = mass / (mass + 1 - weight)
    u = torch.rand_like(h)
    taken = ((u < h) & tree.valid)[:, 1:]  # (B, N - 1)
    index = torch.arange(1, N, device=probs.device)
    accepted = (taken * index).amax(-1) if N > 1 else torch.zeros(B, dtype=torch.long, device=probs.device)
    rows = torch.arange(B, device=probs.device)
    w = weight[rows, accepted][:, None]
    residual = _residual(w * probs[rows, accepted], q[rows, accepted])
    path = torch.arange(N, device=probs.device).expand(B, N)
    return Verdict(path, accepted, sample(residual))


def recursive_rejection(tree: DraftTree, probs: Tensor) -> Verdict:
    """Drawn tree: try a node's children in the order they were drawn, without replacement.

    Child x is accepted with min(1, p(x) / q(x)); after a rejection p becomes norm((p - q)+) and q loses x and is
    renormalised, which is the distribution that the next sibling was drawn from. Lossless by Sequoia (2402.12374,
    theorem 3.3). On a chain this is `speculative_sampling`.

    Args:
        probs: (B, N, V) float32.
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
        walking = accepted == depth - 1  # rows that took a child at the last depth
        stays = node
        for c in range(children.shape[2]):
            child = children[rows, stays, c]  # (B,)
            considered = walking & (child >= 0) & (accepted == depth - 1)
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
    # A row that stopped has tried all children of its node: p is by now the residual after them.
    return Verdict(path, accepted, sample(p))


def typical(tree: DraftTree, probs: Tensor, epsilon: float = 0.09, delta: float = 0.3) -> Verdict:
    """LOSSY. Accept what the target finds typical: p(x) >= min(epsilon, delta * exp(-entropy(p))).

    Takes the longest typical path and samples the token after it. The output's law is not the target's: text is
    more probable than plain sampling's. Medusa (2401.10774, section 2.3.1), whose defaults these are.

    Args:
        probs: (B, N, V) float32.
        epsilon: hard threshold. delta: scale of the entropy-dependent one.
    """
    B = len(probs)
    rows = torch.arange(B, device=probs.device)
    entropy = -torch.special.xlogy(probs, probs).sum(-1)  # (B, N)
    threshold = (delta * (-entropy).exp()).clamp(max=epsilon)
    parent = tree.parents.clamp(min=0)
    p_x = probs[rows[:, None], parent, tree.tokens]  # (B, N) p of each node after its parent
    typical_ = (p_x >= threshold.gather(1, parent)) & tree.valid
    typical_[:, 0] = True
    whole = (tree.ancestors <= typical_[:, None, :]).all(-1) & tree.valid  # every ancestor typical, itself included
    last = torch.where(whole, tree.depth, -1).argmax(-1)  # (B,) deepest node of a typical path
    accepted = tree.depth[rows, last]
    return Verdict(_path_to(tree, last), accepted, sample(probs[rows, last]))


def _drawn(tree: DraftTree) -> Tensor:
    if tree.probs is None:
        raise ValueError("this rule needs the draft's distributions: DraftTree.probs is None (a deterministic draft)")
    return tree.probs


def _residual(p: Tensor, q: Tensor) -> Tensor:
    """(p - q)+ over the last dimension; p itself where rounding left nothing of it."""
    residual = (p - q).clamp_(min=0)
    return torch.where(residual.sum(-1, keepdim=True) > 0, residual, p)


def _normalised(x: Tensor) -> Tensor:
    return x / x.sum(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
