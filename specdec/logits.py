"""`NodeProcessors`: a `LogitsProcessorList` applied to every node of a draft tree, exactly as plain decoding would.

Owns which processors may be asked about drafted text at all and what prefix each node shows them. Knows nothing of
acceptance.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
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
)
OF_THE_END = (hf.MinLengthLogitsProcessor, hf.MinNewTokensLengthLogitsProcessor)  # of these, on end tokens alone
# or a state that follows the text: these must only ever see committed prefixes.
STATEFUL = (
    hf.UnbatchedClassifierFreeGuidanceLogitsProcessor,
    hf.ClassifierFreeGuidanceLogitsProcessor,
    hf.SynthIDTextWatermarkLogitsProcessor,
    hf.WhisperTimeStampLogitsProcessor,
    hf.WhisperNoSpeechDetection,
)


class NodeProcessors:
    """Applies processors to the logits of a tree's nodes.

    Context-free processors see all nodes at once. Others are called with B rows of one length, one node of each row
    at a time, as in plain decoding, so that processors which use the row's index stay right.
    """

    def __init__(self, processors: LogitsProcessorList):
        self.processors = list(processors)

    @property
    def order_needs_no_text(self) -> bool:
        """No processor looks at the text, but to see whether it may end here."""
        return all(_reads_scores_alone(processor) or type(processor) in OF_THE_END for processor in self.processors)

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
                flat = scores.flatten(0, 1)
                fast = _FAST.get(type(processor))
                done = fast(processor, flat) if fast else processor(flat.new_empty(0, 0, dtype=torch.long), flat)
                scores = done.view_as(scores)
            else:
                texts = prefixes() if texts is None else texts
                scores = _by_prefix(processor, texts, scores, ruled_out)
        return scores


def _reads_scores_alone(processor: Any) -> bool:
    return type(processor) in CONTEXT_FREE  # a subclass may read the text as well


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
    """`TopPLogitsWarper` without sorting the whole vocabulary (8 x 152k: 37 ms sorted on two CPU cores).

    A token stays iff the mass before it, in descending order, is below top_p; once the leading tokens hold that much,
    the others need no order.
    """
    lead = min(1024, scores.shape[-1])
    if processor.top_p >= 1.0 or processor.min_tokens_to_keep > lead:
        return processor(None, scores)
    probs = scores.softmax(-1)
    top, index = probs.topk(lead, dim=-1)
    cumulative = top.cumsum(-1)
    if lead < scores.shape[-1] and bool((cumulative[:, -1] < processor.top_p).any()):
        return processor(None, scores)
    keep = (cumulative - top) < processor.top_p
    keep[:, : processor.min_tokens_to_keep] = True
    kept = scores.gather(1, index).masked_fill(~keep, processor.filter_value)
    return torch.full_like(scores, processor.filter_value).scatter_(1, index, kept)


_FAST: dict[type, Callable[[Any, Tensor], Tensor]] = {hf.TopPLogitsWarper: _top_p}


def stateful(processors: LogitsProcessorList, input_ids: Tensor, vocab_size: int) -> str | None:
    """The class name of the first processor that must not see drafted text, or None.

    Processors we don't know are tried out on a copy: one whose attributes change in a call follows the text. A
    processor can settle the question itself with a boolean attribute `stateless`.
    """
    for processor in processors:
        if isinstance(processor, CONTEXT_FREE + PURE) and type(processor).__module__ == hf.__name__:
            continue
        if isinstance(processor, STATEFUL) or not _stateless(processor, input_ids, vocab_size):
            return type(processor).__name__
    return None


def _stateless(processor: Any, input_ids: Tensor, vocab_size: int) -> bool:
    declared = getattr(processor, "stateless", None)
    if declared is not None:
        return bool(declared)
    if isinstance(processor, (types.FunctionType, types.MethodType, types.BuiltinFunctionType)):
        return True  # a plain function is taken at its word
    try:
        trial = copy.deepcopy(processor)
        before = _fingerprint(vars(trial))
        trial(input_ids, torch.zeros(len(input_ids), vocab_size, device=input_ids.device))
        return before == _fingerprint(vars(trial))
    except Exception:  # cannot be copied, or fails on a text it did not choose: assume the worse
        return False


def _fingerprint(value: Any, depth: int = 4) -> Any:
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.detach().cpu().flatten().tolist())
    if isinstance(value, dict):
        return {str(key): _fingerprint(item, depth) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_fingerprint(item, depth) for item in value]
    if isinstance(value, (int, float, str, bytes, bool, type(None), torch.dtype, torch.device)):
        return value
    return (id(value), _fingerprint(vars(value), depth - 1) if depth and hasattr(value, "__dict__") else None)
