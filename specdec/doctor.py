"""`diagnose`: what limits the speed-up of a target and a proposer on this machine, and which draft would be best.

Owns the measurement and the words. Speed-ups are simulated from the seconds of a target pass over n tokens and, of a
chain of k tokens, conditional acceptance per position and seconds of a draft pass, as chains showed them; of a dynamic
tree, its own mean acceptance length, nodes and seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.capability import capability
from specdec.costs import pass_costs, target_runner
from specdec.data.conversations import read_prompts
from specdec.generator import SpeculativeGenerator
from specdec.proposers import DraftModelProposer, Eagle3Proposer, HybridProposer, Proposer
from specdec.proposers.autoregressive import AutoregressiveProposer
from specdec.report import Report
from specdec.runner import device_of
from specdec.tree import DynamicTree

ABOUT = 0.95  # of the best simulated speed-up: as good as that
PROBED = 8  # drafted per round, to see the acceptance at so many positions
LONGEST = 16  # simulated
TREE_DEPTH, TREE_SIZES = 6, (8, 24, 60)  # of the trees tried
SELDOM = 0.95  # share of rounds with a draft below which it is worth a line
MODEL_OF: dict[type, str] = {DraftModelProposer: "DRAFT", Eagle3Proposer: "HEAD"}  # as the advice calls it
PASSES = (1, 2, 4, 8, 16, 32, 64)  # tokens of the target's passes that are timed


@dataclass(frozen=True)
class MeasuredTree:
    """What dynamic trees of one shape brought, per draft.

    Attributes:
        tokens: mean acceptance length. nodes: drafted, the root not counted. seconds: of drafting.
    """

    shape: DynamicTree
    tokens: float
    nodes: float
    seconds: float

    @classmethod
    def of(cls, shape: DynamicTree, report: Report) -> MeasuredTree | None:
        """None if nothing was drafted."""
        drafts = report.num_drafts
        if not drafts:
            return None
        nodes, seconds = report.num_draft_tokens / drafts, report.seconds["draft"] / drafts
        return cls(shape, report.mean_acceptance_length, nodes, seconds)


@dataclass(frozen=True)
class Diagnosis:
    """What was measured, and what follows from it.

    Attributes:
        acceptance: of chains, conditional, per position.
        draft_pass: seconds, with what is made of its output; 0 for a proposer without a model.
        target_pass: seconds of a target pass over n tokens, by n.
        uncovered: share of the target's tokens that the draft's vocabulary lacks.
        elsewhere: acceptance at the first position on our own prompts, None if not measured.
        measured_speedup: with the automatic length, decoding only.
        trees: the dynamic trees that were tried; none for proposers that draft none, and targets that take none.
        drafts_trees: the proposer was given drafts trees, so that a chain is a shape to ask for.
        drafted: share of the rounds in which something was drafted; n-grams often find nothing.
        maker: how the proposer is made in Python, up to its shape. alone: what was measured of a `HybridProposer`, in
            words; empty for others.
    """

    acceptance: tuple[float, ...]
    draft_pass: float
    target_pass: dict[int, float]
    uncovered: float
    elsewhere: float | None
    measured_speedup: float
    trees: tuple[MeasuredTree, ...] = ()
    drafts_trees: bool = False
    drafted: float = 1.0
    maker: str = "Eagle3Proposer(HEAD, "
    alone: str = ""

    def speedup(
        self, draft: int | MeasuredTree, *, free: bool = False, flat: bool = False, sure: bool = False
    ) -> float:
        """Simulated speed-up of chains of so many tokens, or of a tree.

        Args:
            free: drafting takes no time. flat: verification costs what a single token does.
            sure: the whole chain is accepted, or a path down to the tree's deepest nodes.
        """
        if isinstance(draft, MeasuredTree):
            nodes, seconds = draft.nodes, draft.seconds
            gained = 1 + min(draft.shape.depth, nodes) if sure else draft.tokens
        else:
            nodes, seconds = draft, draft * self.draft_pass
            gained = 1.0 + draft if sure else self.tokens(draft)
        one = self.target_pass[1]
        verify = one if flat else self._pass(1 + nodes)
        spent = self.drafted * (verify + (0.0 if free else seconds)) + (1 - self.drafted) * one
        return (1 + self.drafted * (gained - 1)) * one / spent

    def tokens(self, length: int) -> float:
        """Expected tokens per round of chains of so many, the bonus or recovered token included."""
        gained, reached = 1.0, 1.0
        for position in range(length if self.acceptance else 0):
            reached *= self.acceptance[min(position, len(self.acceptance) - 1)]
            gained += reached
        return gained

    @property
    def best_length(self) -> int:
        """Of chains; 0: drafting none is faster."""
        return max(range(LONGEST + 1), key=self.speedup)

    @property
    def best_tree(self) -> MeasuredTree | None:
        return max(self.trees, key=self.speedup, default=None)

    @property
    def best(self) -> int | MeasuredTree:
        """The fastest of all: the length of a chain, 0 for no draft at all, or a tree."""
        return max(self._drafts, key=self.speedup)

    @property
    def _drafts(self) -> list[int | MeasuredTree]:
        return [*range(LONGEST + 1), *self.trees]

    def _pass(self, tokens: float) -> float:
        """Seconds of a pass over so many tokens, between the measured sizes."""
        sizes = sorted(self.target_pass)
        for low, high in pairwise(sizes):
            if tokens <= high:
                share = (tokens - low) / (high - low)
                return (1 - share) * self.target_pass[low] + share * self.target_pass[high]
        return self.target_pass[sizes[-1]] * tokens / sizes[-1]

    def in_words(self) -> str:
        """The figures, the best draft and how to get it, and what would help most."""
        one, best, tree = self.target_pass[1], self.best_length, self.best_tree
        verify = ", ".join(f"{n}: {seconds / one:.2f}" for n, seconds in self.target_pass.items())
        rates = " ".join(f"{rate:.2f}" for rate in self.acceptance) or "nothing was drafted"
        rows = [
            ("acceptance per position", rates + (", of chains" if self.trees else "")),
            ("a target pass", f"{1e3 * one:.1f} ms; over n tokens, as multiples: {verify}"),
            ("a draft pass", f"{1e3 * self.draft_pass:.1f} ms, {self.draft_pass / one:.2f} of the target's"),
            ("best chain", f"{best} tokens: {self._simulated(best, self.tokens(best))}"),
            ("measured, automatic length", f"{self.measured_speedup:.2f}x (decoding only)"),
            ("fastest by these figures", self._advice()),
        ]
        if tree is not None:
            rows.insert(4, ("best tree", f"{tree.shape.size} nodes: {self._simulated(tree, tree.tokens)}"))
        if self.drafted < SELDOM:
            rows.insert(0, ("rounds with a draft", f"{100 * self.drafted:.0f}%"))
        if self.alone:
            rows.insert(0, ("measured", self.alone))
        return "\n".join([*(f"{name:<28} {value}" for name, value in rows), "", *self._limits()])

    def _simulated(self, draft: int | MeasuredTree, tokens: float) -> str:
        return f"{self.speedup(draft):.2f}x by these figures ({1 + self.drafted * (tokens - 1):.2f} tokens a round)"

    def _advice(self) -> str:
        """How to get the best draft."""
        best = self.best
        if best == 0:
            return "plain decoding: draft_length=0"
        if self.measured_speedup >= ABOUT * self.speedup(best):
            return "the automatic length: leave it as it is"
        if isinstance(best, MeasuredTree):
            return f"the tree: {self.maker}tree={best.shape})"
        if self.drafts_trees:
            return f"the chain: {self.maker}branching=(1,) * {best})"
        return f"the chain: draft_length={best}"

    @property
    def _faster(self) -> str:
        if self.maker.startswith("Eagle3Proposer"):
            return "train one with a smaller --draft-vocab or --intermediate-size, if the target is not small itself"
        return "use a smaller one, an EAGLE-3 head, or vocab= to trim it"

    def _limits(self) -> list[str]:
        def reach(**better: Any) -> float:
            return max(self.speedup(draft, **better) for draft in self._drafts)

        now = reach()
        cures = {
            "acceptance": (reach(sure=True), "better drafts (at the very best, all accepted)"),
            "drafting": (reach(free=True), "drafting for nothing"),
            "verification": (reach(flat=True), "verification at the price of one token"),
        }
        out = []
        if self.best == 0:
            what = "neither a chain nor a tree" if self.trees else "no chain"
            out.append(f"Drafting does not pay here: {what} is faster than plain decoding.")
        worst = max(cures, key=lambda name: cures[name][0])
        for name, (speed, what) in sorted(cures.items(), key=lambda item: -item[1][0]):
            mark = "limits most: " if name == worst else ""
            if not mark and speed < 1.02 * now:
                continue
            out.append(f"{mark}{what} would bring {speed:.2f}x instead of {now:.2f}x.")
        if worst == "acceptance":
            beside = "" if self.alone else ', or n-grams beside either ("ngram+eagle3", "ngram+draft:PATH")'
            out.append(
                "What accepts more: an EAGLE-3 head trained on text like yours (`specdec train`), a larger draft model"
                f"{beside}."
            )
        if self.draft_pass > 0.25 * self.target_pass[1]:
            out.append(f"The draft is slow beside its target: {self._faster}.")
        if self.uncovered > 0.05:
            out.append(
                f"{100 * self.uncovered:.0f}% of what the target writes is not in the draft's vocabulary: each such "
                "token ends a draft. Choose a larger draft vocabulary, from text like yours."
            )
        if self.elsewhere is not None and self.acceptance and self.elsewhere > self.acceptance[0] + 0.1:
            out.append(
                f"On plain questions in English and Python the first token is accepted {self.elsewhere:.2f} of the "
                f"time, on your prompts {self.acceptance[0]:.2f}: the draft does not know this kind of text, or the "
                "prompts miss the chat template."
            )
        return out


def questions(path: Path) -> Iterator[list[dict[str, str]]]:
    """Messages up to where the target is to answer, of what `regenerate` reads."""
    for _, messages in read_prompts(path):
        last = max(i for i, message in enumerate(messages) if message["role"] == "user")
        yield messages[: last + 1]


def first_questions(path: Path, limit: int) -> tuple[list[list[dict[str, str]]], int]:
    """The first `limit` of them, and how many there are; a broken line further down is said, too."""
    kept, count = [], 0
    for count, messages in enumerate(questions(path), start=1):
        if count <= limit:
            kept.append(messages)
    return kept, count


def diagnose(
    target: PreTrainedModel,
    proposer: Proposer | PreTrainedModel | str,
    prompts: Sequence[Tensor],
    *,
    usual: Sequence[Tensor] = (),
    max_new_tokens: int = 64,
    progress: Callable[[int, int], Any] = lambda done, total: None,
    **arguments: Any,
) -> Diagnosis:
    """Measure a target and a proposer (of a `HybridProposer`, what drafts beside the n-grams) on prompts (T,) int64.

    Each prompt is answered with a chain of fixed length, as the proposer itself decides, and with each of the trees.

    Args:
        usual: prompts that most drafts are good at, to tell a bad draft from unusual prompts.
        max_new_tokens: tokens to write for each prompt at most.
        progress: called with the steps done and those there are.
        arguments: more of `generate()`'s; greedy by default.
    """
    arguments = {"do_sample": False, "max_new_tokens": max_new_tokens, **arguments}
    automatic = SpeculativeGenerator(target, proposer, on_unsupported="error")
    alone = ""
    if isinstance(automatic.proposer, HybridProposer):
        automatic = SpeculativeGenerator(target, automatic.proposer.other, on_unsupported="error")
        alone = f"{_name(automatic.proposer)} alone, n-grams aside"
    drafts = automatic.proposer
    takes_trees = capability(target).trees
    drafts_trees = takes_trees and _drafts_trees(drafts)
    shapes = _trees(drafts) if takes_trees else []
    done, total = 0, (2 + len(shapes)) * len(prompts) + len(usual) + 1

    def step() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    def run(spec: SpeculativeGenerator, asked: Sequence[Tensor]) -> tuple[Report, list[Tensor]]:
        """Its report, and what it wrote."""
        texts = []
        for prompt in asked:
            ids = prompt[None].to(device_of(target))
            mask = torch.ones_like(ids)  # without one, a pad token in a prompt would be taken for padding
            texts.append(spec.generate(ids, attention_mask=mask, **arguments)[0, len(prompt) :])
            step()
        return spec.report, texts

    def fixed(shape: Proposer, length: int) -> SpeculativeGenerator:
        return SpeculativeGenerator(target, shape, draft_length=length, on_unsupported="error")

    progress(done, total)
    report, texts = run(fixed(_chain(drafts), PROBED), prompts)
    run(automatic, prompts)
    elsewhere = None
    if usual:
        other, _ = run(fixed(_chain(drafts), PROBED), usual)
        elsewhere = next(iter(other.conditional_acceptance_rate_per_pos), 0.0)
    trees = []
    for shape in shapes:
        assert isinstance(drafts, AutoregressiveProposer)
        trees.append(MeasuredTree.of(shape, run(fixed(drafts.shaped(tree=shape), shape.depth), prompts)[0]))
    costs = pass_costs(target_runner(target), sizes=PASSES)
    step()
    passes = report.num_draft_passes
    return Diagnosis(
        acceptance=tuple(rate for rate in report.conditional_acceptance_rate_per_pos if rate == rate),
        draft_pass=report.seconds["draft"] / passes if passes else 0.0,
        target_pass=costs,
        uncovered=_uncovered(drafts, torch.cat(texts)),
        elsewhere=elsewhere,
        measured_speedup=costs[1] / automatic.report.time_per_output_token,
        trees=tuple(tree for tree in trees if tree is not None),
        drafts_trees=drafts_trees,
        drafted=report.num_drafts / max(1, report.num_row_rounds),
        maker=f"{type(drafts).__name__}({MODEL_OF.get(type(drafts), '...')}, ",
        alone=alone,
    )


def _drafts_trees(proposer: Proposer) -> bool:
    """Does a model draft trees, as it was made?"""
    if not isinstance(proposer, AutoregressiveProposer):
        return False
    return proposer.tree is not None or proposer.branching is not None


def _chain(proposer: Proposer) -> Proposer:
    """Where it drafts trees, the same model drafting chains: acceptance per position is that of chains."""
    if isinstance(proposer, AutoregressiveProposer) and _drafts_trees(proposer):
        return proposer.shaped(branching=(1,) * PROBED)
    return proposer


def _trees(proposer: Proposer) -> list[DynamicTree]:
    """Those to try: as wide as the proposer's own, which knows what is a cheap pass for its model."""
    if not isinstance(proposer, AutoregressiveProposer):
        return []
    top_k = (proposer.tree or DynamicTree()).top_k
    return [DynamicTree(TREE_DEPTH, top_k, size) for size in TREE_SIZES]


def _name(proposer: Proposer) -> str:
    names = {Eagle3Proposer: "the head", DraftModelProposer: "the draft model"}
    return names.get(type(proposer), type(proposer).__name__)


def _uncovered(proposer: Proposer, tokens: Tensor) -> float:
    known = proposer.known_tokens() if isinstance(proposer, AutoregressiveProposer) else None
    if known is None:
        return 0.0
    return float((~torch.isin(tokens.cpu(), known.cpu())).float().mean())
