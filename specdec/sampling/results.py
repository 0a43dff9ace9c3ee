"""The result of verifying a draft: `RoundResult` on the device, `HostResult` on the host.

Transcript, report, pacing and proposers read the `HostResult`, which reaches the host in one copy. A proposer that
needs only each row's `NewTokens` can draft before the host has read them (`Proposer.draft_ahead`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec.sampling.draft_tree import DraftTree
from specdec.utils.device_copies import sent
from specdec.utils.moved import warn_of_old_name


@dataclass(frozen=True)
class HostResult:
    """A round's result on the host, as lists of B rows.

    Attributes:
        accepted: (B,), number of accepted draft tokens.
        tokens: each row's new tokens: the accepted ones, then the bonus or recovered one.
        path: (B, D), as in `RoundResult`.
        parents: (B, N), as in `DraftTree`.
        confidence_bins: (B, N), as in `DraftTree`; None if the draft has none.
        notes: lists (B, n) by name, as in `DraftTree`.

    Examples:
        >>> result = HostResult([1], [[7, 4]], [[0, 1]], [[-1, 0, 0]], None, {})
        >>> result.nodes, result.deepest
        ([2], [1])
    """

    accepted: list[int]
    tokens: list[list[int]]
    path: list[list[int]]
    parents: list[list[int]]
    confidence_bins: list[list[int]] | None
    notes: Mapping[str, list[list[Any]]]

    @cached_property
    def nodes(self) -> list[int]:
        """Number of drafted tokens per row."""
        return [sum(parent >= 0 for parent in row) for row in self.parents]

    @cached_property
    def deepest(self) -> list[int]:
        """Depth of each row's deepest node."""
        return [max(depths_of(row)) for row in self.parents]


def depths_of(parents: Sequence[int]) -> list[int]:
    """Each node's distance from the root, which comes first; 0 for padding.

    Examples:
        >>> depths_of([-1, 0, 0, 1])
        [0, 1, 1, 2]
    """
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths


@dataclass(frozen=True)
class NewTokens:
    """New tokens of B rows, padded on the left to D.

    Attributes:
        tokens: (B, D) int64, the accepted tokens, then the bonus or recovered one.
        pads: (B,) int64, how many of the D are padding.
        states: (B, D, C), the target's features at the token before each of them; None for a proposer without taps.

    Examples:
        >>> NewTokens(torch.tensor([[3, 4]]), torch.tensor([0]), None).padded(3)
        NewTokens(tokens=tensor([[0, 3, 4]]), pads=tensor([1]), states=None)
    """

    tokens: Tensor
    pads: Tensor
    states: Tensor | None

    def padded(self, width: int) -> NewTokens:
        """Pad to `width` tokens."""
        more = width - self.tokens.shape[1]
        if not more:
            return self
        states = None if self.states is None else pad(self.states, (0, 0, more, 0))
        return NewTokens(pad(self.tokens, (more, 0)), self.pads + more, states)


@dataclass(frozen=True)
class RoundResult:
    """The result of verifying a draft, on the device. Each row gets `accepted + 1` new tokens.

    Attributes:
        draft: the draft.
        path: (B, D) int64, node indices from the root (column 0) down the accepted path. Beyond a row's accepted
            length each column holds its own index, so that moving node path[d] to slot d changes nothing there.
        accepted: (B,) int64, number of accepted draft tokens, < D.
        next_token: (B,) int64, the token after the path: the bonus token if the whole path was accepted, else the
            recovered one.
        tokens: (B, D) int64, the accepted tokens, then `next_token`; row b's first `accepted[b] + 1` entries count.
        scores: (B, V) float32 each, the processed scores that each new token was chosen from. Empty if not recorded.
        written: number of tokens that the text has already, because stateful processors must see it grow.
        hold: column at which rows wait for the others, because its token cannot be chosen before; None for none.
        left_padded: the same tokens, left-padded, of a captured round, which has moved the path in the cache as well.
        cut: the result on the host, cut to what the text got; None before the text has it.

    Examples:
        >>> tree = DraftTree(torch.tensor([[1, 2, 3]]), torch.tensor([[-1, 0, 0]]))
        >>> result = RoundResult.of(tree, torch.tensor([[0, 2]]), torch.tensor([1]), torch.tensor([4]))
        >>> result.tokens
        tensor([[3, 4]])
        >>> result.host().tokens
        [[3, 4]]
    """

    draft: DraftTree
    path: Tensor
    accepted: Tensor
    next_token: Tensor
    tokens: Tensor
    scores: Sequence[Tensor] = ()
    written: int = 0
    hold: int | None = None
    left_padded: NewTokens | None = None
    cut: HostResult | None = None

    @classmethod
    def of(cls, draft: DraftTree, path: Tensor, accepted: Tensor, next_token: Tensor) -> RoundResult:
        """The result of accepting a path; arguments as for the class."""
        tokens = torch.cat([draft.tokens.gather(1, path)[:, 1:], next_token[:, None]], dim=1)
        return cls(draft, path, accepted, next_token, tokens.scatter(1, accepted[:, None], next_token[:, None]))

    def send(self) -> None:
        """Start copying the result to the host, so that `host` waits for less."""
        self._arriving  # noqa: B018

    def host(self) -> HostResult:
        """The result on the host. The first call waits for the copy: the only host sync of a round."""
        return self.cut or self._host

    @cached_property
    def _arriving(self) -> Callable[[], dict[str, list[Any]]]:
        draft = self.draft
        parts = {"accepted": self.accepted, "tokens": self.tokens, "path": self.path, "parents": draft.parents}
        if draft.confidence_bins is not None:
            parts["confidence_bins"] = draft.confidence_bins
        return sent(parts | {f"note {name}": note for name, note in draft.notes.items()})

    @cached_property
    def _host(self) -> HostResult:
        lists = self._arriving()
        return HostResult(
            accepted=lists["accepted"],
            tokens=[row[: 1 + count] for row, count in zip(lists["tokens"], lists["accepted"], strict=True)],
            path=lists["path"],
            parents=lists["parents"],
            confidence_bins=lists.get("confidence_bins"),
            notes={name: lists[f"note {name}"] for name in self.draft.notes},
        )

    def in_text(self, accepted: Sequence[int], counts: Sequence[int]) -> RoundResult:
        """This result as proposers observe it: the host's lists end with the text.

        Args:
            accepted: (B,), number of accepted tokens that each row's text got.
            counts: (B,), number of new tokens that it got.
        """
        host = self.host()
        tokens = [row[:count] for row, count in zip(host.tokens, counts, strict=True)]
        return replace(self, cut=replace(host, accepted=list(accepted), tokens=tokens))

    @property
    def outcome(self) -> HostResult:
        """Deprecated name of `host()`."""
        warn_of_old_name("Verdict.outcome", "RoundResult.host()")
        return self.host()

    def new_tokens(self, tree: DraftTree) -> Tensor:
        """Deprecated name of `tokens`."""
        warn_of_old_name("Verdict.new_tokens", "RoundResult.tokens")
        return self.tokens


def features_at(features: Tensor, nodes: Tensor) -> Tensor:
    """Select the features of some nodes.

    Args:
        features: (B, N, C), features of all nodes.
        nodes: (B, W) int64, indices of nodes.

    Returns:
        (B, W, C), the features of `nodes`.

    Examples:
        >>> features_at(torch.tensor([[[0.5], [1.5], [2.5]]]), torch.tensor([[2, 0]]))
        tensor([[[2.5000],
                 [0.5000]]])
    """
    return features.gather(1, nodes.to(features.device)[..., None].expand(-1, -1, features.shape[-1]))
