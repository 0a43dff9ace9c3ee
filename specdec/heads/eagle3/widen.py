"""`widened`: a head that is narrower than its target, made as wide as that, for engines that know no others."""

from __future__ import annotations

from dataclasses import replace

import torch

from specdec.heads.eagle3.head import Eagle3Head


@torch.no_grad()
def widened(head: Eagle3Head) -> Eagle3Head:
    """The same drafts by a head of its target's width: what is added is zeros. The head itself if it has that width.

    Raises:
        ValueError: a head that is wider than its target.
    """
    c = head.config
    if c.embedding_size == c.hidden_size:
        return head
    if c.hidden_size > c.target_hidden_size:
        raise ValueError(
            f"this head is {c.hidden_size} wide, its target {c.target_hidden_size}, which no other engine reads: "
            'export it with the layout "int8", for specdec'
        )
    wide = Eagle3Head(replace(c, hidden_size=c.target_hidden_size)).to(head.device, head.dtype)
    shrunk = (c.hidden_size / c.target_hidden_size) ** 0.5  # a norm's mean square is over more entries
    weights = wide.state_dict()
    for name, own in head.state_dict().items():
        norm = name.endswith("norm.weight") and own.shape != weights[name].shape
        weights[name].zero_()[tuple(map(slice, own.shape))] = own * shrunk if norm else own
    return wide
