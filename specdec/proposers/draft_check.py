"""`checked`: checks of a draft, which may come from third-party code."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from specdec.proposers.context import Context
from specdec.sampling.draft_tree import DraftTree
from specdec.utils.device_copies import HOST


def checked(draft: object, context: Context, who: str, values: bool) -> DraftTree:
    """Check a draft, and move it to the device of the text. Node 0 is not checked: the loop replaces it by the root.

    Args:
        draft: what a proposer returned.
        context: the context that it drafted for.
        who: the proposer and its method, for messages.
        values: True to check tokens and parents wherever they are. False leaves out drafts on a device, where this is
            a host sync, and those for a captured round, which `Context.chain` has checked.

    Raises:
        TypeError: not a `DraftTree`.
        ValueError: wrong batch size, shape, dtype, token or parent.
    """
    if not isinstance(draft, DraftTree):
        raise TypeError(
            f"{who} must return a DraftTree, got {type(draft).__name__}: build one with context.chain(drafts)"
        )
    B, N = draft.tokens.shape
    if context.batch_size != B or N == 0:
        raise ValueError(
            f"{who} returned {B} rows of {N} nodes for a batch of {context.batch_size} rows: each row needs at least a "
            "root"
        )
    if draft.tokens.is_floating_point() or draft.parents.is_floating_point():
        raise ValueError(
            f"{who} returned tokens of {draft.tokens.dtype} and parents of {draft.parents.dtype}: use int64"
        )
    if draft.probs is not None and draft.probs.shape != (B, N, context.vocab_size):
        raise ValueError(
            f"{who} returned probs of shape {tuple(draft.probs.shape)}: they need (B, N, V) = "
            f"{(B, N, context.vocab_size)}, a distribution over the target's vocabulary after each node"
        )
    if N == 1:
        return DraftTree.root_only(context.root)
    captured = context.call.recorder is not None and context.host_roots is not None
    on_host = draft.tokens.device.type == HOST.type and captured
    where = HOST if on_host else context.tokens.device  # a captured round takes either
    tokens, parents = (t.to(where, torch.long) for t in (draft.tokens, draft.parents))
    if values or (tokens.device.type == HOST.type and not on_host):
        _check_values(tokens.to(HOST), parents.to(HOST), draft.chain, context.vocab_size, who)
    probs = None if draft.probs is None else draft.probs.to(where)
    return replace(draft, tokens=tokens, parents=parents, probs=probs)


def _check_values(tokens: Tensor, parents: Tensor, chain: bool, vocab_size: int, who: str) -> None:
    least, most = int(tokens[:, 1:].min()), int(tokens[:, 1:].max())
    if not 0 <= least <= most < vocab_size:
        outside = least if least < 0 else most
        raise ValueError(f"{who} drafted a token outside of the target's vocabulary of {vocab_size}: {outside}")
    node = torch.arange(tokens.shape[1], device=tokens.device)
    if bool((parents >= node).any()) or bool((parents[:, 0] != -1).any()):
        raise ValueError(f"{who} drafted a node before its parent: parents have lower indices, the root's is -1")
    orphan = (parents > 0) & (parents.gather(1, parents.clamp(min=0)) < 0)
    if bool(orphan.any()):
        raise ValueError(f"{who} drafted a node whose parent is padding (parent -1)")
    if chain and bool(((parents >= 0) & (parents != node - 1)).any()):
        raise ValueError(f"{who} set chain=True, but the parent of some node is not the node before it")
