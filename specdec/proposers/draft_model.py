"""`DraftModelProposer`: a smaller causal LM with the target's tokenizer drafts, one pass per drafted token.

Owns the draft model's runner, whose cache follows the accepted text: nothing is fed twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from specdec.acceptance import sample
from specdec.proposers.base import Context, Proposer
from specdec.proposers.draft_view import FEW_TOKENS, int8_pays, with_int8_linears, with_trimmed_head
from specdec.runner import ModelRunner
from specdec.tree import DraftTree, Verdict

CONFIDENCES = 20  # bins of the draft's top probability
LARGEST_PADDING = 1024  # vocabularies whose sizes differ by more are taken for different ones


class DraftModelProposer(Proposer):
    """Drafts chains, or trees of a fixed shape.

    At T > 0 a chain is drawn from the draft's own processed distribution q (temperature, top-k, penalties applied);
    at T = 0 it is the draft's argmax. A chain ends where the next token is not worth its cost (see `Pacer`), judged
    by the draft's top probability.

    Args:
        model: the draft model, or a path or hub id to load one from.
        branching: children per node at each depth, (3, 2, 1) say, for a tree instead of a chain. At T > 0 children
            are drawn from q without replacement if `draw`, else they are q's top tokens.
        draw: at T > 0, draw the draft from q (True), or choose q's most probable tokens (False).
        vocab: restrict the draft's LM head to these token ids, (K,) int64, or to the `vocab` lowest ids, which in BPE
            vocabularies are the earliest merges and so the most frequent tokens; None: the whole vocabulary. With
            152k tokens the head is a quarter of a 0.5B draft's time.
        int8: read the weights as 8-bit integers while drafting single tokens (CPU, bfloat16; half a copy of the
            weights in memory). None: where it pays.
    """

    def __init__(
        self,
        model: PreTrainedModel | str,
        *,
        branching: Sequence[int] | None = None,
        draw: bool = True,
        vocab: Tensor | int | None = None,
        int8: bool | None = None,
    ):
        if branching is not None and (not branching or any(width < 1 for width in branching)):
            raise ValueError(f"branching needs at least one child at every depth, got {tuple(branching)}")
        self.model = load(model) if isinstance(model, str) else model
        self.branching, self.draw = branching, draw
        self.vocab = _vocabulary(self.model, vocab)
        view = self.model if self.vocab is None else with_trimmed_head(self.model, self.vocab)
        self.runner = ModelRunner(with_int8_linears(view) if _decide(int8, self.model) else view)
        self._fed = 0  # drafted nodes in the runner's cache

    def check(self, target: PreTrainedModel) -> None:
        ours, theirs = (m.config.get_text_config(decoder=True).vocab_size for m in (self.model, target))
        if abs(ours - theirs) > LARGEST_PADDING:
            raise ValueError(
                f"the draft model's vocabulary has {ours} tokens and the target's {theirs}: they don't share a "
                "tokenizer. Choose a draft model of the target's family."
            )
        differing = _first_difference(_vocabulary_of(self.model), _vocabulary_of(target))
        if differing is not None:
            raise ValueError(
                f"the draft model's tokenizer ({self.model.name_or_path}) and the target's ({target.name_or_path}) "
                f"differ, at token id {differing} first. Choose a draft model of the target's family."
            )
        if target.device.type != self.model.device.type:
            raise ValueError(
                f"the draft model is on {self.model.device} and the target on {target.device}: move the draft with "
                f"draft.to('{target.device}')"
            )

    def begin(self, context: Context) -> None:
        self.runner.start(context.batch_size)
        self._fed = 0

    def propose(self, context: Context) -> DraftTree:
        rows = context.rows
        pacer = context.pacer
        limit = min(pacer.limit, max((context.room[b] for b in rows), default=0))
        if limit == 0 or not pacer.may_start(_chances(context, pacer.expected_rate), draft_steps=1):
            return DraftTree.root_only(context.root)
        logits = self._catch_up(context)  # (B, 1, V)
        if self.branching and not context.chains_only:
            return self._grow_tree(context, logits, limit)
        return self._grow_chain(context, logits, limit)

    def observe(self, draft: DraftTree, verdict: Verdict, accepted: Sequence[int]) -> None:
        if self._fed == 0:
            return
        # The target's node n is pending node n - 1 here: the root is committed already. Nodes of the last depth
        # were never fed; accepted or not, the next catch-up feeds what is missing.
        path = verdict.path[:, 1:] - 1
        if draft.chain:
            self.runner.commit([min(taken, self._fed) for taken in accepted])
        else:
            fed = (path < self._fed).long().cumprod(-1).sum(-1).tolist()
            growth = [min(taken, most) for taken, most in zip(accepted, fed, strict=True)]
            place = torch.arange(path.shape[1], device=path.device)
            within = place < torch.tensor(growth, device=path.device)[:, None]
            self.runner.commit(growth, torch.where(within, path, place))
        self._fed = 0

    def _catch_up(self, context: Context) -> Tensor:
        """Feed what the text gained since the last draft, the root included; logits after it, (B, 1, V)."""
        missing = [
            max(0, end - pad - have) if active else 0
            for end, pad, have, active in zip(
                context.ends, context.pads, self.runner.lengths, context.active, strict=True
            )
        ]
        width, start = max(missing), perf_counter()
        ends = torch.tensor(list(context.ends), device=context.tokens.device)[:, None]
        columns = (ends - width + torch.arange(width, device=ends.device)).clamp(min=0)
        tokens = context.tokens.gather(1, columns)
        logits = self.runner.extend(tokens, [width - m for m in missing]).logits
        if width <= FEW_TOKENS:  # then it costs what a draft pass costs
            context.pacer.observe_draft_step(perf_counter() - start)
        return self._full(logits, context.vocab_size)

    def _grow_chain(self, context: Context, logits: Tensor, limit: int) -> DraftTree:
        pacer, B = context.pacer, context.batch_size
        draw = context.sampling and self.draw
        drafts: list[Tensor] = []
        probs: list[Tensor] = []
        keys: list[list[int]] = []
        chances = _chances(context, 1.0)
        while True:
            scores = self._processed(context, logits, drafts)[:, 0]  # (B, V)
            q = scores.softmax(-1) if draw else None
            if pacer.length is None:
                keys.append(_confidence(scores, q))
                chances = _onward(context, chances, keys[-1], len(drafts))
            if not pacer.worth(chances, len(drafts)):
                break
            token = sample(q) if q is not None else scores.max(-1).indices  # (B,)
            drafts.append(token)
            if q is not None:
                probs.append(q)
            onward = [chance * pacer.expected_rate for chance in chances]
            if len(drafts) >= limit or not pacer.worth(onward, len(drafts), draft_steps=1):
                break
            start = perf_counter()
            M = len(drafts)
            depth = torch.arange(M, device=token.device).expand(B, M)
            seen = torch.ones(B, 1, M, dtype=torch.bool, device=token.device)
            logits = self._full(self.runner.grow(token[:, None], depth, seen, chain=True).logits, context.vocab_size)
            self._fed += 1
            pacer.observe_draft_step(perf_counter() - start)
        if not drafts:
            return DraftTree.root_only(context.root)
        lengths = torch.tensor(
            [min(len(drafts), context.room[b]) if context.active[b] else 0 for b in range(B)],
            device=context.tokens.device,
        )
        return DraftTree.from_chain(
            context.root,
            torch.stack(drafts, 1),
            lengths,
            probs=torch.stack(probs, 1) if probs else None,
            keys=torch.tensor(keys[: len(drafts)], device=lengths.device).T if keys else None,
        )

    def _grow_tree(self, context: Context, logits: Tensor, limit: int) -> DraftTree:
        """The same shape in every row, whatever is drawn: the shape must not depend on the tokens."""
        assert self.branching is not None
        B, device = context.batch_size, context.tokens.device
        draw = context.sampling and self.draw
        tokens, parents, depth = context.root[:, None], [-1], [0]
        q_rows: list[Tensor] = []
        level = [0]  # node indices whose logits we have
        for d, width in enumerate(self.branching[:limit], start=1):
            scores = self._processed(context, logits, [], tokens, parents, level)  # (B, n, V)
            probs = scores.softmax(-1)
            children = _draw_without_replacement(probs, width) if draw else probs.topk(width, -1).indices
            if draw:
                q_rows.append(probs)
            first = len(parents)
            parents += [node for node in level for _ in range(width)]
            depth += [d] * (len(level) * width)
            tokens = torch.cat([tokens, children.flatten(1)], 1)
            level = list(range(first, len(parents)))
            if d == min(limit, len(self.branching)):
                break
            so_far = DraftTree(tokens, torch.tensor(parents, device=device).expand(B, -1))
            ancestors = so_far.ancestors[:, first:, 1:]  # without the root, which is committed here
            depths = torch.tensor(depth[1:], device=device).expand(B, -1) - 1
            logits = self._full(
                self.runner.grow(tokens[:, first:].clamp(min=0), depths, ancestors).logits, context.vocab_size
            )
            self._fed += len(level)
        q = None
        if q_rows:
            leaves = q_rows[0].new_zeros(B, len(level), q_rows[0].shape[-1])
            q = torch.cat([*q_rows, leaves], 1)
        return _fitted(context, tokens, parents, depth, q)

    def _processed(
        self,
        context: Context,
        logits: Tensor,
        drafts: Sequence[Tensor],
        tokens: Tensor | None = None,
        parents: Sequence[int] = (),
        level: Sequence[int] = (),
    ) -> Tensor:
        """The call's processors on the draft's logits (B, n, V), each node after its own text."""

        def texts() -> list[list[Tensor]]:
            text = [context.tokens[b, : context.ends[b]] for b in range(context.batch_size)]
            if tokens is None:
                return [[torch.cat([text[b], *(draft[b : b + 1] for draft in drafts)])] for b in range(len(text))]
            paths = [_path(parents, node) for node in level]
            return [[torch.cat([text[b], tokens[b, path].clamp(min=0)]) for path in paths] for b in range(len(text))]

        return context.processors(logits, texts)

    def _full(self, logits: Tensor, vocab_size: int) -> Tensor:
        """Logits over the target's vocabulary: what the draft does not know gets -inf."""
        if self.vocab is not None:
            full = logits.new_full((*logits.shape[:-1], vocab_size), float("-inf"))
            return full.index_copy_(-1, self.vocab.to(logits.device), logits)
        missing = vocab_size - logits.shape[-1]
        return nn.functional.pad(logits, (0, missing), value=float("-inf")) if missing > 0 else logits[..., :vocab_size]


def load(path: str, **kwargs: Any) -> PreTrainedModel:
    """Load a draft model in the precision it was saved in."""
    return AutoModelForCausalLM.from_pretrained(path, dtype="auto", **kwargs).eval()


def _vocabulary_of(model: PreTrainedModel) -> dict[int, str] | None:
    """The tokens of the tokenizer that lies beside the model's weights; None where there is none at hand."""
    if not model.name_or_path:
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(model.name_or_path, local_files_only=True)
    except Exception:  # no tokenizer there, or one that needs what is not installed: nothing to compare
        return None
    return {index: token for token, index in tokenizer.get_vocab().items()}


def _first_difference(ours: dict[int, str] | None, theirs: dict[int, str] | None) -> int | None:
    """The lowest token id that both know by different names, or None."""
    if ours is None or theirs is None:
        return None
    return min((index for index in ours.keys() & theirs.keys() if ours[index] != theirs[index]), default=None)


def _decide(int8: bool | None, model: PreTrainedModel) -> bool:
    pays = int8_pays(model)
    if int8 and not pays:
        raise ValueError(
            f"int8 drafting needs a bfloat16 model of at least 50M parameters on a CPU, got {model.dtype}, "
            f"{model.num_parameters() / 1e6:.0f}M parameters on {model.device}. Use int8=None."
        )
    return pays if int8 is None else int8


def _vocabulary(model: PreTrainedModel, vocab: Tensor | int | None) -> Tensor | None:
    size = model.config.get_text_config(decoder=True).vocab_size
    if vocab is None or (isinstance(vocab, int) and vocab >= size):
        return None
    if isinstance(vocab, int) and vocab < 1:
        raise ValueError(f"vocab must be a positive number of tokens or a tensor of token ids, got {vocab}")
    known = torch.arange(vocab) if isinstance(vocab, int) else vocab.long().cpu()
    ends = model.generation_config.eos_token_id if model.generation_config else None
    ends = [ends] if isinstance(ends, int) else list(ends or [])
    known = torch.cat([known, torch.tensor(ends, dtype=torch.long)]).unique()
    if int(known[0]) < 0 or int(known[-1]) >= size:
        raise ValueError(f"vocab holds ids from {int(known[0])} to {int(known[-1])}, the draft knows 0 to {size - 1}")
    return known


def _confidence(scores: Tensor, q: Tensor | None) -> list[int]:
    """Per row, the bin of the draft's top probability, from its scores (B, V) or its q (B, V): 1 to CONFIDENCES."""
    top = q.amax(-1) if q is not None else (scores.amax(-1) - scores.logsumexp(-1)).exp()  # (B,)
    return [1 + int(p * (CONFIDENCES - 1e-3)) for p in top.tolist()]


def _chances(context: Context, rate: float) -> list[float]:
    """`rate` for each row worth drafting for, 0 for the others: they take part in the passes for nothing."""
    return [rate if active and room > 0 else 0.0 for active, room in zip(context.active, context.room, strict=True)]


def _onward(context: Context, chances: Sequence[float], keys: Sequence[int], drafted: int) -> list[float]:
    """Per row, the chance that this token and all before it are accepted. keys: its confidence in all rows."""
    acceptance = context.pacer.acceptance
    rates = [acceptance.rate(key, prior=key / CONFIDENCES) for key in keys]
    rows = context.rows
    context.pacer.observe_expectation(sum(rates[b] for b in rows) / len(rows))
    return [
        chance * rate if room > drafted else 0.0
        for chance, rate, room in zip(chances, rates, context.room, strict=True)
    ]


def _draw_without_replacement(probs: Tensor, width: int) -> Tensor:
    """(..., width) tokens of (..., V) probs, in the order successive draws without replacement give them.

    Gumbel top-k (Kool et al. 1903.06059). Where fewer than `width` tokens have a probability, -1 fills up.
    """
    noise = torch.empty_like(probs).exponential_()
    top = (probs / noise).topk(min(width, probs.shape[-1]), -1)
    drawn = torch.where(top.values > 0, top.indices, -1)
    return nn.functional.pad(drawn, (0, width - drawn.shape[-1]), value=-1)


def _path(parents: Sequence[int], node: int) -> list[int]:
    """Nodes from the root's child down to `node`."""
    path: list[int] = []
    while node > 0:
        path.insert(0, node)
        node = parents[node]
    return path


def _fitted(
    context: Context, tokens: Tensor, parents: Sequence[int], depth: Sequence[int], q: Tensor | None
) -> DraftTree:
    """The tree with each row cut to its room, and children that could not be drawn (-1) taken out."""
    B, N = tokens.shape
    room = torch.tensor([r if a else 0 for r, a in zip(context.room, context.active, strict=True)])
    shape = torch.tensor(list(parents)).expand(B, N)
    keep = (torch.tensor(list(depth)) <= room[:, None]).to(tokens.device) & (tokens >= 0)
    shape = shape.to(tokens.device)
    for node in range(1, N):  # a node goes with its parent
        keep[:, node] &= keep[:, parents[node]]
    if q is not None:  # where children were cut off nothing was drawn
        drawn = torch.zeros(B, N, dtype=torch.bool, device=tokens.device)
        for node in range(1, N):
            drawn[:, parents[node]] |= keep[:, node]
        q = q * drawn[..., None]
    return DraftTree(tokens.clamp(min=0), shape.masked_fill(~keep, -1), q)
