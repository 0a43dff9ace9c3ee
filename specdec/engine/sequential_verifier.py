"""`SequentialVerifier`: follows the target's own choices from the root, as plain decoding makes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from specdec.engine.transcript import Transcript
from specdec.models.output import Output
from specdec.sampling.draft_tree import DraftTree
from specdec.sampling.logits_processors import NodeProcessors
from specdec.sampling.noise import Noise
from specdec.sampling.results import RoundResult
from specdec.sampling.sequential_acceptance import accept_sequentially
from specdec.utils.device_copies import uploaded

OnToken = Callable[[RoundResult], bool]  # appends one token to the text; False once plain decoding would stop


class SequentialVerifier:
    """Accepts drafted tokens that equal the target's own choice, evaluating only the nodes on the accepted path.

    Args:
        processors: the call's logits processors.
        noise: exponential noise of the call's sampling; None at T = 0, where the best token is chosen.
    """

    def __init__(self, processors: NodeProcessors, noise: Noise | None):
        self.processors, self.noise = processors, noise

    def __call__(self, draft: DraftTree, output: Output, text: Transcript, on_token: OnToken) -> RoundResult:
        step = _Step(self, draft, output, text, on_token)
        result = accept_sequentially(draft, step.choose, step.alive, None if self.processors.known else step.write)
        return replace(result, scores=step.scores, written=step.written, hold=step.hold)

    def chosen_tokens(
        self, scores: Tensor, columns: list[int], alive: Tensor, draft: DraftTree, node: Tensor
    ) -> Tensor:
        """Choose the tokens that plain decoding would choose.

        Args:
            scores: (B, V) float32, processed.
            columns: of each row, the output column that the token is for (the first new token's is 0).
            alive: (B,) bool, rows whose choice matters.
            draft: the draft being verified.
            node: (B,) int64, the node after which each row chooses.

        Returns:
            (B,) int64.
        """
        if self.noise is None:
            # `max` returns the first of equal maxima like `argmax`, and is 4x faster on bfloat16.
            return scores.max(-1).indices
        probs = scores.softmax(-1)
        noise = self.noise.at(columns).to(probs.device)[:, : probs.shape[-1]]
        perturbed = (probs / noise).max(-1)
        if perturbed.values.device.type == "cpu" and bool((perturbed.values.isnan() & alive).any()):
            torch.multinomial(probs[alive], 1)  # raises the error of plain decoding for such scores
        return perturbed.indices


class _Step:
    """State of `SequentialVerifier` during one round.

    Attributes:
        alive: (B,) bool, rows that need a next token.
        scores: processed scores (B, V) by depth.
        written: number of tokens appended to the text so far (only if processors must see the text grow).
        hold: as in `RoundResult`.
    """

    def __init__(
        self, verifier: SequentialVerifier, draft: DraftTree, output: Output, text: Transcript, on_token: OnToken
    ):
        self.verifier, self.draft, self.output, self.text, self.on_token = verifier, draft, output, text, on_token
        self.ends = list(text.ends)
        self.rows = torch.arange(text.batch_size, device=output.logits.device)
        finished = uploaded([text.padding, text.active], self.rows.device).bool()
        self.padding, self.alive = finished[0], finished[0] | finished[1]
        self.scores: list[Tensor] = []
        self.written = 0
        self.hold: int | None = None

    def choose(self, path: Tensor, alive: Tensor) -> Tensor | None:
        """Choose the token after each row's last node.

        An error of a processor is raised when plain decoding would raise it: once the text before it is settled. Until
        then the round ends before the failing node, or, at the root, rows that are ahead wait for the others.

        Args:
            path: (B, d + 1) int64, nodes from the root.
            alive: (B,) bool, rows that are still on their path.

        Returns:
            (B,) int64, or None to end the round before this node.
        """
        while True:
            try:
                return self._chosen(path, alive & self.alive)
            except Exception:
                if path.shape[1] > 1 and self.verifier.processors.known:
                    return None
                ends = [end for end, alive in zip(self.ends, self.alive.tolist(), strict=True) if alive]
                if min(ends) == max(ends):
                    raise
                self.hold = max(ends)
                self.alive = self.alive & uploaded([end < self.hold for end in self.ends], self.alive.device).bool()

    def _chosen(self, path: Tensor, alive: Tensor) -> Tensor:
        text, depth = self.text, path.shape[1] - 1
        logits = self.output.logits[self.rows, path[:, -1]]  # (B, V)
        scores = self.verifier.processors(logits[:, None], lambda: self._texts(path), ~self.alive[:, None])[:, 0]
        taken = _depths(path) if path.device.type == "cpu" else [depth] * len(path)  # avoids a host sync
        columns = [end - text.start + more for end, more in zip(self.ends, taken, strict=True)]
        self._fit_noise(columns)
        token = self.verifier.chosen_tokens(scores, columns, alive & ~self.padding, self.draft, path[:, -1])
        self.scores.append(scores)
        return torch.where(self.padding, text.filler, token)  # finished rows get padding

    def _fit_noise(self, columns: list[int]) -> None:
        """Draw no noise for tokens that a processor drops, as plain decoding does."""
        noise, sizes = self.verifier.noise, self.verifier.processors.sizes
        if noise is not None and sizes:
            for column in columns:
                noise.fit(column, sizes.get(self.text.start + column, noise.shape[1]))

    def write(self, path: Tensor, token: Tensor) -> bool:
        """Append a token (B,) before processors run again; return False once plain decoding would stop."""
        self.written += 1
        drafted = torch.ones_like(token)  # the token is in the draft: its node comes next
        root = DraftTree.root_only(self.draft.tokens[:, 0])
        return self.on_token(RoundResult(root, path[:, -1:], drafted, token, token[:, None], self.scores[-1:]))

    def _texts(self, path: Tensor) -> list[list[Tensor]]:
        """Text [b][0] of each row up to its node, in `generate()`'s layout; padded for finished rows."""
        text, drafted, depths = self.text, self.draft.tokens.gather(1, path)[:, 1:], _depths(path)
        longest = max(end + depth for end, depth in zip(self.ends, depths, strict=True))
        return [
            [text.padded(b, longest) if over else torch.cat([text.tokens[b, : self.ends[b]], drafted[b, : depths[b]]])]
            for b, over in enumerate(text.finished)
        ]


def _depths(path: Tensor) -> list[int]:
    """Depth of each row's last node, which its path (B, d + 1) repeats once the row has stopped."""
    return (path[:, 1:] != path[:, :-1]).sum(1).tolist()
