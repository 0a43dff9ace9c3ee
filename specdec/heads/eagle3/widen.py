"""`widened`: pads a head that is narrower than its target with zeros, for engines that require equal widths."""

from __future__ import annotations

from dataclasses import replace

import torch

from specdec.heads.eagle3.head import Eagle3Head


@torch.no_grad()
def widened(head: Eagle3Head) -> Eagle3Head:
    """Return a head of the target's width that drafts the same tokens, or the head itself if it has that width.

    Raises:
        ValueError: the head is wider than its target.
    """
    c = head.config
    if c.embedding_size == c.hidden_size:
        return head
    if c.hidden_size > c.target_hidden_size:
        raise ValueError(
            f"this head is {c.hidden_size} wide, its target {c.target_hidden_size}, and no other engine reads heads "
            'wider than the target: export it with the layout "int8", for specdec'
        )
    wide = Eagle3Head(replace(c, hidden_size=c.target_hidden_size)).to(head.device, head.dtype)
    shrunk = (c.hidden_size / c.target_hidden_size) ** 0.5  # the mean square of a norm is taken over more entries
    weights = wide.state_dict()
    for name, own in head.state_dict().items():
        norm = name.endswith("norm.weight") and own.shape != weights[name].shape
        weights[name].zero_()[tuple(map(slice, own.shape))] = own * shrunk if norm else own
    return wide
