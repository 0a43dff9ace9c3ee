"""`NodeProcessors`: a `LogitsProcessorList` applied to every node of a draft tree, exactly as plain decoding would.

Owns which processors may be asked about drafted text at all and what prefix each node shows them. Knows nothing of
acceptance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as hf

# Read in transformers 5.23, generation/logits_process.py: their __call__ uses the scores alone,
CONTEXT_FREE = (
    hf.TemperatureLogitsWarper,
    hf.TopKLogitsWarper,
    hf.TopPLogitsWarper,
    hf.MinPLogitsWarper,
    hf.TypicalLogitsWarper,
    hf.EpsilonLogitsWarper,
    hf.EtaLogitsWarper,
    hf.SuppressTokensLogitsProcessor,
    hf.InfNanRemoveLogitsProcessor,
    hf.LogitNormalization,
    *([hf.TopHLogitsWarper] if hasattr(hf, "TopHLogitsWarper") else []),
)
ANY_VOCABULARY = tuple(kind for kind in CONTEXT_FREE if kind is not hf.SuppressTokensLogitsProcessor)
# or the scores and the prefix, with nothing remembered from call to call that changes the result;
PURE = (
    hf.MinLengthLogitsProcessor,
    hf.MinNewTokensLengthLogitsProcessor,
    hf.RepetitionPenaltyLogitsProcessor,
    hf.EncoderRepetitionPenaltyLogitsProcessor,
    hf.NoRepeatNGramLogitsProcessor,
    hf.EncoderNoRepeatNGramLogitsProcessor,
    hf.SequenceBiasLogitsProcessor,
    hf.NoBadWordsLogitsProcessor,
    hf.PrefixConstrainedLogitsProcessor,
    hf.ForcedBOSTokenLogitsProcessor,
    hf.ForcedEOSTokenLogitsProcessor,
    hf.ExponentialDecayLengthPenalty,
    hf.SuppressTokensAtBeginLogitsProcessor,
    hf.WatermarkLogitsProcessor,
    hf.WhisperTimeStampLogitsProcessor,
)
ROUNDING = 1e-4  # of sums of probabilities, in any order: a thousand times what was seen in float32
OF_THE_END = (hf.MinLengthLogitsProcessor, hf.MinNewTokensLengthLogitsProcessor)  # of these, on end tokens alone
# All others may keep a state that follows the text: they must be called as plain decoding calls them.


class NodeProcessors:
    """Applies processors to the logits of a tree's nodes.

    Context-free processors see all nodes at once. Others are called with B rows of one length, one node of each row
    at a time, as in plain decoding, so that processors which use the row's index stay right.
    """

    def __init__(self, processors: Iterable[Any]):
        self.processors = list(processors)

    @property
    def unknown(self) -> list[str]:
        """Names of those that may follow the text with a state, and must be called as plain decoding calls them."""
        return [_name(processor) for processor in self.processors if follows_the_text(processor)]

    @property
    def known(self) -> bool:
        """All of them may be asked about drafted text."""
        return not self.unknown

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(type(processor).__name__ for processor in self.processors)

    @property
    def read_scores_alone(self) -> bool:
        """None of them looks at the text."""
        return all(_reads_scores_alone(processor) for processor in self.processors)

    def without_unknown(self) -> NodeProcessors:
        """Those that a draft may go by."""
        return NodeProcessors(processor for processor in self.processors if not follows_the_text(processor))

    @property
    def fit_any_vocabulary(self) -> bool:
        """None of them looks at the text (but to see whether it may end here) or names tokens."""
        return all(type(processor) in ANY_VOCABULARY + OF_THE_END for processor in self.processors)

    def in_any_vocabulary(self, scores: Tensor) -> Tensor:
        """Processed scores (..., K) over some of the tokens; those of the end have no say."""
        flat = scores.flatten(0, -2)
        for processor in self.processors:
            if type(processor) in ANY_VOCABULARY:
                flat = _scores_alone(processor, flat)
        return flat.view_as(scores)

    def __call__(
        self, logits: Tensor, prefixes: Callable[[], list[list[Tensor]]], ruled_out: Tensor | None = None
    ) -> Tensor:
        """Processed scores.

        Args:
            logits: (B, N, V), any float dtype; not modified.
            prefixes: called only if some processor reads text; [b][n] is the (T,) int64 text, in `generate()`'s
                layout (left padding included), that row b has after node n.
            ruled_out: (B, N) bool, nodes known never to be reached: a processor that cannot bear their text may fail.

        Returns:
            (B, N, V) float32.
        """
        scores = logits.float()
        if self.processors and scores is logits:
            scores = logits.clone()
        texts: list[list[Tensor]] | None = None
        for processor in self.processors:
            if _reads_scores_alone(processor):
                scores = _scores_alone(processor, scores.flatten(0, 1)).view_as(scores)
            else:
                texts = prefixes() if texts is None else texts
                scores = _by_prefix(processor, texts, scores, ruled_out)
        return scores


def _reads_scores_alone(processor: Any) -> bool:
    return type(processor) in CONTEXT_FREE  # a subclass may read the text as well


def _scores_alone(processor: Any, scores: Tensor) -> Tensor:
    """A processor of CONTEXT_FREE on scores (M, K)."""
    fast = _FAST.get(type(processor))
    return fast(processor, scores) if fast else processor(scores.new_empty(0, 0, dtype=torch.long), scores)


def _name(processor: Any) -> str:
    return getattr(processor, "__name__", type(processor).__name__)


def _by_prefix(processor: Any, texts: Sequence[Sequence[Tensor]], scores: Tensor, dead: Tensor | None = None) -> Tensor:
    """Call `processor` on (B, T) texts of one length at a time, until every node of every row had its turn.

    Plain decoding never shows a processor a text that it ruled out itself. A `prefix_allowed_tokens_fn` may know
    nothing to allow there, and raise: that is no error, for such a node is never reached, whatever its scores.
    """
    B = len(texts)
    out = scores.clone()
    never = [[False] * len(row) for row in texts] if dead is None else dead.tolist()
    turns: dict[tuple[int, int], dict[int, int]] = {}  # (length, k-th node of that length) -> {row: node}
    for b, row in enumerate(texts):
        seen: dict[int, int] = {}
        for n, text in enumerate(row):
            k = seen[len(text)] = seen.get(len(text), -1) + 1
            turns.setdefault((len(text), k), {})[b] = n
    start = [min(map(len, row)) for row in texts]  # texts of a row are one up to here
    known: dict[tuple[int, tuple[int, ...]], int | None] = {}  # (row, drafted text) -> its node, None: ruled out
    for (length, _), nodes in sorted(turns.items()):  # parents first
        live: dict[int, int] = {}  # row -> node
        ruled_out: dict[int, int] = {}
        for b, n in nodes.items():
            drafted = tuple(texts[b][n][start[b] :].tolist())
            parent = known.get((b, drafted[:-1]), n) if drafted else n  # n itself: there is none
            possible = parent == n or (parent is not None and out[b, parent, drafted[-1]] != float("-inf"))
            possible = possible and not never[b][n]
            (live if possible else ruled_out)[b] = n
            known.setdefault((b, drafted), n if possible else None)
        for group in (live, ruled_out):
            if not group:
                continue
            # Rows without such a node show an earlier text of their own if they can; the result is dropped.
            other = next(iter(group.items()))
            picks = [(b, group.get(b, 0)) if b in group or len(texts[b][0]) >= length else other for b in range(B)]
            text = torch.stack([texts[b][n][:length] for b, n in picks])  # (B, T)
            try:
                done = processor(text, torch.stack([scores[b, n] for b, n in picks]))  # (B, V)
            except Exception:
                if group is live:
                    raise
                continue
            for b, n in group.items():
                out[b, n] = done[b]
    return out


def _top_p(processor: Any, scores: Tensor) -> Tensor:
    """`TopPLogitsWarper` without sorting the whole vocabulary (8 x 152k: 37 ms sorted on two CPU cores), bit for bit.

    A token stays iff the mass before it, in descending order, is below top_p; once the leading tokens hold that much,
    the others need no order. Where the border is so close that the order of summation decides, or the order of equal
    scores, transformers' own answer is asked for.
    """
    lead = min(1024, scores.shape[-1])
    # Off the CPU sorting is fast, and the look at the values below would be waited for.
    if processor.top_p >= 1.0 or processor.min_tokens_to_keep >= lead or scores.device.type != "cpu":
        return processor(None, scores)
    top, index = scores.topk(lead, dim=-1)
    probs = (top - scores.logsumexp(-1, keepdim=True)).exp()
    cumulative = probs.cumsum(-1)
    before = cumulative - probs  # the mass in front of each
    close = ((before - processor.top_p).abs() < ROUNDING).any(-1)
    short = cumulative[:, -1] < processor.top_p + ROUNDING if lead < scores.shape[-1] else close
    keep = before < processor.top_p
    keep[:, : processor.min_tokens_to_keep] = True
    last = (keep.sum(-1, keepdim=True) - 1).clamp(max=lead - 2)
    equal = top.gather(1, last) == top.gather(1, last + 1)
    if bool((close | short | equal[:, 0] | probs.isnan().any(-1)).any()):
        return processor(None, scores)
    kept = top.masked_fill(~keep, processor.filter_value)
    return torch.full_like(scores, processor.filter_value).scatter_(1, index, kept)


_FAST: dict[type, Callable[[Any, Tensor], Tensor]] = {hf.TopPLogitsWarper: _top_p}


def follows_the_text(processor: Any) -> bool:
    """Whether it may have a state that follows the text, so that a call about drafted text could change its answers.

    Transformers' own are known. Of any other, a function included, it is assumed, unless a boolean attribute
    `stateless` says that its answers depend on its arguments alone.
    """
    declared = getattr(processor, "stateless", None)
    if declared is not None:
        return not declared
    return type(processor) not in CONTEXT_FREE + PURE
