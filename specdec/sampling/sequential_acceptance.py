"""`accept_sequentially`: the path along choices that are made one node after the other."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specdec.sampling.draft_tree import DraftTree
from specdec.sampling.results import RoundResult


def accept_sequentially(
    tree: DraftTree,
    choose: Callable[[Tensor, Tensor], Tensor | None],
    alive: Tensor,
    go_on: Callable[[Tensor, Tensor], bool] | None = None,
) -> RoundResult:
    """Follow the target's choices from the root for as long as a child carries the chosen token.

    The tokens are the target's choices in their order, independent of the draft. `choose` is called for reached nodes
    only.

    Args:
        tree: the draft.
        choose: maps path (B, d + 1) int64, the nodes from the root to each row's current node, and alive (B,) bool,
            the rows whose result is used, to the target's tokens (B,) int64. It may return None below the root:
            verification then stops one node earlier.
        alive: (B,) bool, rows to verify.
        go_on: called with path and token (B,) before a child is entered; False stops verification before that child.

    Examples:
        >>> tree = DraftTree.from_chain(torch.tensor([1]), torch.tensor([[2, 7]]))
        >>> counting = lambda path, alive: tree.tokens.gather(1, path)[:, -1] + 1  # t is followed by t + 1
        >>> result = accept_sequentially(tree, counting, torch.tensor([True]))
        >>> result.accepted, result.next_token
        (tensor([1]), tensor([3]))
    """
    node = torch.zeros_like(tree.tokens[:, 0])
    accepted, next_token = node, node
    reached, places = [node], [node]
    may_sync = node.device.type == "cpu" or go_on is not None  # stopping early is not worth a host sync by itself
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
        if (may_sync and not bool(alive.any())) or (go_on is not None and not go_on(path, token)):
            break
        node = torch.where(alive, child, node)
        accepted = accepted + alive
        reached.append(node)
        places.append(torch.where(alive, child, depth))
    return RoundResult.of(tree, torch.stack(places, 1), accepted, next_token)
