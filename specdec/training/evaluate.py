"""Evaluation of a head: measured with the real decoder, and simulated on the same texts. Both must agree."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.data.conversations import context_of
from specdec.engine.generator import SpeculativeGenerator
from specdec.engine.settings import MEASURED
from specdec.heads.dflash.head import DFlashHead
from specdec.heads.embeddings import BorrowedEmbeddings
from specdec.heads.kinds import Head
from specdec.heads.mtp.trainable import MtpTrainee
from specdec.models.hidden_states import Taps
from specdec.models.introspection import device_of
from specdec.proposers.draft_heads.block import BlockProposer
from specdec.proposers.draft_heads.eagle3 import Eagle3Proposer
from specdec.proposers.draft_heads.feature_proposer import FeatureProposer
from specdec.proposers.draft_heads.mtp import MtpProposer
from specdec.sampling.dynamic_tree import DynamicTree
from specdec.training.objectives.block_unroll import lm_head_weight, unroll_blocks
from specdec.training.objectives.mtp import unroll_mtp
from specdec.training.objectives.unroll import unroll
from specdec.training.teacher.base import taps_of
from specdec.training.teacher.target_logits import TargetLogits
from specdec.training.time_limit import OutOfTime

NEW_TOKENS = 64  # tokens to decode per prompt
TREE = DynamicTree(depth=6, top_k=8, size=24)
# Decode from the target's plain distribution, as in training, whatever its generation config says.
GREEDY: dict[str, Any] = MEASURED | {"do_sample": False, "repetition_penalty": 1.0}
SAMPLED: dict[str, Any] = GREEDY | {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}


@dataclass(frozen=True)
class Evaluation:
    """Evaluation of a head with the decoder, on some prompts.

    Attributes:
        mean_acceptance_length: mean acceptance length of greedy chains, measured with the decoder.
        simulated_length: the same, simulated by teacher forcing on the decoder's own texts.
        acceptance_rate_per_pos: conditional acceptance rate by position, measured with the decoder.
        tree_length: mean acceptance length with trees of 24 nodes at T = 0.
        tree_length_sampled: the same at T = 1.
        texts: number of prompts decoded; 0 in evaluations of earlier versions, which decoded all.
    """

    mean_acceptance_length: float
    simulated_length: float
    acceptance_rate_per_pos: tuple[float, ...]
    tree_length: float
    tree_length_sampled: float
    texts: int = 0

    @property
    def agrees(self) -> bool:
        """True if measured and simulated length agree. They are equal in float32; half precision breaks near ties."""
        if math.isnan(self.mean_acceptance_length):  # nothing was drafted
            return True
        return abs(self.mean_acceptance_length - self.simulated_length) <= 0.05 * self.simulated_length

    @property
    def warning(self) -> str:
        """Warning if training and decoding disagree; empty otherwise."""
        if math.isnan(self.mean_acceptance_length):
            return "nothing was drafted for the held-out texts, so the head is not measured: use longer ones"
        if self.agrees:
            return ""
        return (
            f"the decoder accepts {self.mean_acceptance_length:.2f} tokens per draft, but teacher forcing on the same "
            f"texts predicts {self.simulated_length:.2f}: training and decoding compute the head differently. Check "
            "taps, shift, mask, norms and positions"
        )


@dataclass(frozen=True)
class HeldOut:
    """Evaluation of a head by teacher forcing on held-out texts, without the decoder.

    Attributes:
        loss: mean loss per token, weighted over steps.
        simulated_length: mean acceptance length, taking the steps as independent.
        rows: number of rows measured; 0 in evaluations of earlier versions, which measured all.
    """

    loss: float
    simulated_length: float
    rows: int = 0


Measured = Evaluation | HeldOut


def evaluate(
    head: Head,
    target: PreTrainedModel,
    prompts: Sequence[Tensor],
    *,
    draft_length: int = 5,
    max_new_tokens: int = NEW_TOKENS,
    should_continue: Callable[[], bool] = lambda: True,
    progress: Callable[[int], Any] = lambda prompts: None,
    first_within: Callable[[], float] = lambda: math.inf,
) -> Evaluation:
    """Decode each prompt greedily with chains, and with `TREE` at T = 0 and T = 1.

    Args:
        head: head to evaluate.
        target: model that it drafts for.
        prompts: token ids, (T,) int64 each. If a prompt and `max_new_tokens` exceed the target's context, only the
            prompt's end is used.
        draft_length: length of the chains.
        max_new_tokens: tokens to decode per prompt.
        should_continue: called before every prompt but the first. If it returns False, the others are left out.
        progress: called after each prompt with 1.
        first_within: returns the seconds that are left for the first prompt, whose time cannot be predicted.

    Raises:
        OutOfTime: not even the first prompt could be decoded within these seconds.
    """
    context = context_of(target.config)
    max_new_tokens = min(max_new_tokens, context // 2)
    chain = _proposer(head, target, branching=(1,) * draft_length)
    decoder = SpeculativeGenerator(target, chain, draft_length=draft_length, on_unsupported="error")
    trees = [
        SpeculativeGenerator(
            target, _proposer(head, target, tree=TREE), draft_length=TREE.depth, on_unsupported="error"
        )
        for _ in (GREEDY, SAMPLED)
    ]
    rounds = accepted = done = 0
    for prompt in prompts:
        if done and not should_continue():
            break
        prompt = prompt[-(context - max_new_tokens) :]
        within = (lambda: math.inf) if done else first_within
        text = _decoded(decoder, prompt, within, max_new_tokens=max_new_tokens, **GREEDY)
        lengths = accepted_lengths(head, target, text, draft_length, first=len(prompt) - 1)
        root = len(prompt)  # the first new token comes from the prefill
        behind = 1 if len(text) == len(prompt) + max_new_tokens else 0  # the last round's bonus token ends the text
        while root < len(text) - 1:
            room = len(text) - 1 - behind - root
            taken = min(lengths[root - 1], room)
            if room > 0:
                rounds, accepted = rounds + 1, accepted + taken
            root += 1 + taken
        for spec, sampling in zip(trees, (GREEDY, SAMPLED), strict=True):
            _decoded(spec, prompt, within, max_new_tokens=max_new_tokens, **sampling)
        done += 1
        progress(1)
    report = decoder.report
    return Evaluation(
        mean_acceptance_length=report.mean_acceptance_length,
        simulated_length=1 + accepted / max(1, rounds),
        acceptance_rate_per_pos=tuple(report.conditional_acceptance_rate_per_pos),
        tree_length=trees[0].report.mean_acceptance_length,
        tree_length_sampled=trees[1].report.mean_acceptance_length,
        texts=done,
    )


def _proposer(head: Head, target: PreTrainedModel, **shape: Any) -> FeatureProposer:
    if isinstance(head, MtpTrainee):
        return MtpProposer(head.for_target(target), **shape)
    return BlockProposer(head, **shape) if isinstance(head, DFlashHead) else Eagle3Proposer(head, **shape)


def _decoded(decoder: SpeculativeGenerator, prompt: Tensor, within: Callable[[], float], **options: Any) -> Tensor:
    """Decode one prompt (T,) in the seconds that `within` returns. Raise OutOfTime if they are too few."""
    seconds = within()
    if seconds != math.inf:
        options |= {"max_time": max(0.0, seconds)}
    text = decoder.generate(**_inputs(prompt, decoder.model), **options)[0]
    if within() <= 0:
        raise OutOfTime
    return text


def _inputs(prompt: Tensor, target: PreTrainedModel) -> dict[str, Tensor]:
    """Return the inputs with a mask, without which `generate()` would take pad tokens in the prompt for padding."""
    ids = prompt[None].to(device_of(target))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@torch.no_grad()
def accepted_lengths(head: Head, target: PreTrainedModel, text: Tensor, steps: int, first: int = 0) -> list[int]:
    """Return for each position i of a text how many tokens of a greedy chain drafted after token i + 1 are right.

    Args:
        head: head that drafts.
        target: model that it drafts for.
        text: (T,) int64.
        steps: length of the chain.
        first: first position to compute. Earlier ones are 0.
    """
    listener = Taps(target, taps_of(head, target), head.device)
    with listener.listening() as taken:
        target.get_decoder()(input_ids=text[None], use_cache=False)
    ids = text.to(head.device)
    right = torch.zeros(len(text), steps, dtype=torch.long, device=head.device)
    for step, logits in enumerate(drafted_logits(head, target, text, listener.features(taken), steps, first)):
        assert head.draft_to_target is not None
        right[: len(logits), step] = (head.draft_to_target[logits.argmax(-1)] == ids[2 + step :]).long()
    lengths = right.cumprod(-1).sum(-1)
    lengths[:first] = 0
    return lengths.tolist()


@torch.no_grad()
def drafted_logits(
    head: Head, target: PreTrainedModel, text: Tensor, states: Tensor, steps: int, first: int = 0
) -> Iterator[Tensor]:
    """Compute the head's logits at every position of a text, using teacher forcing.

    Args:
        head: head that drafts K tokens.
        target: model that it drafts for.
        text: (T,) int64.
        states: (1, T, n * H), the target's states that the head reads.
        steps: drafted tokens.
        first: first position to compute. Rows before it are undefined.

    Yields:
        For each step, (n, K). Row i has the logits of token i + 2 + step, given the text up to token i + 1 + step.
    """
    ids, wanted = text[None].to(head.device), (torch.arange(len(text), device=head.device) >= first)[None]
    steps, states = min(steps, len(text) - 2), states.to(head.dtype)
    hidden: Iterator[Tensor]
    if isinstance(head, MtpTrainee):
        weight = TargetLogits.of(target, head.draft_to_target).weight.to(head.device, head.dtype)
        embeds = target.get_input_embeddings()(ids).to(head.device, head.dtype)
        hidden = unroll_mtp(head, embeds, states, steps)
    elif isinstance(head, DFlashHead):
        weight = lm_head_weight(head)
        embed = partial(BorrowedEmbeddings.by(target, head).embedded, head=head, normed=False)
        hidden = (drafted.hidden for drafted in unroll_blocks(head, ids, embed, states, steps, wanted=wanted))
    else:
        assert head.lm_head is not None
        weight, embeds = head.lm_head.weight, BorrowedEmbeddings.by(target, head).embedded(ids, head)
        hidden = map(head.read_out, unroll(head, embeds, states, steps, wanted=wanted))
    for step, h in enumerate(hidden):
        yield nn.functional.linear(h, weight)[0, : len(text) - 2 - step]
