"""`DraftScores`: from a draft's logits to the scores that its tokens are chosen by."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.proposers.context import Context
from specdec.proposers.draft_models.draft_nodes import DraftNodes
from specdec.sampling.logits_processors import widened
from specdec.utils.device_copies import uploaded


class DraftScores:
    """Applies a call's logits processors and noise to the draft's logits.

    Args:
        known: (K,) int64, the target's token ids that the logits are for. None: the first ones.
        device: device of the texts.
    """

    def __init__(self, known: Tensor | None, device: torch.device):
        self.ids = None if known is None else known.to(device)

    def own_vocabulary(self, context: Context) -> Tensor | None:
        """The target's ids (K,) of the draft's tokens, if drafts are chosen among these; None: among the target's.

        The draft's vocabulary is used if no processor reads text or names tokens. Processors that suppress end tokens
        are skipped then: an end token drafted too early is rejected.
        """
        return self.ids if context.call.processors.fit_any_vocabulary else None

    def __call__(self, context: Context, logits: Tensor, stepped: DraftNodes, ids: Tensor | None = None) -> Tensor:
        """Process the logits (B, n, K) after the newest nodes, or after the root if there are none.

        Args:
            context: the state of the batch.
            logits: (B, n, K), in the draft's vocabulary.
            stepped: the nodes so far.
            ids: see `own_vocabulary`; the scores are (B, n, K) then, else (B, n, V).
        """
        if ids is not None:
            scores = context.call.processors.in_any_vocabulary(logits.float())
            return context.coupled_scores(scores, stepped.levels, ids)

        def texts() -> list[list[Tensor]]:
            so_far = [context.tokens[b, : context.ends[b]] for b in range(context.batch_size)]
            if not stepped.levels:
                return [[text] for text in so_far]
            return [[torch.cat([text, path]) for path in stepped.paths(b)] for b, text in enumerate(so_far)]

        full = self._full(logits, context.vocab_size)
        try:
            scores = context.call.processors(full, texts, _unreachable(context, stepped, full.shape[1]))
            scores = widened(scores, context.vocab_size)
        except Exception:  # plain decoding may never reach this text; if it does, verification raises the error
            scores = full.float()
        if context.call.processors.processors:
            # If the processors allow none of the draft's tokens, any token will do: it is going to be rejected.
            nothing = (scores == float("-inf")).all(-1, keepdim=True)
            scores = scores.masked_fill(nothing, 0.0)
        return context.coupled_scores(scores, stepped.levels)

    def _full(self, logits: Tensor, vocab_size: int) -> Tensor:
        """Map logits (..., K) to the target's vocabulary (..., V), with -inf for tokens the draft does not have."""
        if self.ids is not None:
            full = logits.new_full((*logits.shape[:-1], vocab_size), float("-inf"))
            return full.index_copy_(-1, self.ids, logits)
        return widened(logits, vocab_size)[..., :vocab_size]


def _unreachable(context: Context, stepped: DraftNodes, count: int) -> Tensor | None:
    """(B, n) bool: of the last level's `count` nodes, those in finished rows or ruled out by processors."""
    if all(context.active) or context.call.processors.read_scores_alone:
        return stepped.dead
    finished = ~uploaded(context.active, context.tokens.device).bool()[:, None].expand(-1, count)
    return finished if stepped.dead is None else finished | stepped.dead


def top_children(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k most probable entries of scores (..., K): indices and log-probabilities, (..., k) each."""
    top = scores.topk(min(k, scores.shape[-1]), -1)
    log_probs = scores.log_softmax(-1).gather(-1, top.indices)  # one kernel on a device, where logsumexp takes nine
    return top.indices, log_probs.nan_to_num(nan=float("-inf"), neginf=float("-inf"))  # a processor gave +inf
