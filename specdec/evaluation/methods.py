"""`Method`: a way to generate that is measured, and the methods that `bench` and `diagnose` compare."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from specdec.engine.generator import SpeculativeGenerator
from specdec.evaluation.code import code_of
from specdec.models.capability import capability
from specdec.proposers.base import Proposer
from specdec.proposers.draft_heads.block import BlockProposer
from specdec.proposers.draft_heads.eagle3 import Eagle3Proposer
from specdec.proposers.draft_heads.hydra import HydraProposer
from specdec.proposers.draft_heads.mtp import MtpProposer
from specdec.proposers.draft_models.assistant import AssistantProposer
from specdec.proposers.draft_models.autoregressive import AutoregressiveProposer
from specdec.proposers.draft_models.draft_model import DraftModelProposer
from specdec.proposers.draft_models.early_exit import EarlyExitProposer
from specdec.proposers.draft_models.translated import TranslatedDraftProposer
from specdec.proposers.hybrid import HybridProposer
from specdec.proposers.lookup.ngram import NgramProposer
from specdec.proposers.lookup.suffix import SuffixProposer
from specdec.proposers.lookup.text_memory import TextMemory
from specdec.sampling.dynamic_tree import DynamicTree
from specdec.utils.choices import COUPLED, RuleName

PLAIN = "plain"
CHAINS = (2, 4, 8)  # tokens; the last one gives the acceptance rates by position
TREE_DEPTH, TREE_SIZES = 6, (8, 24, 60)
PROPOSERS: dict[type, str] = {  # words for each
    NgramProposer: "n-grams",
    SuffixProposer: "suffixes",
    DraftModelProposer: "the draft model",
    Eagle3Proposer: "the head",
    MtpProposer: "the MTP layers",
    BlockProposer: "the drafter",
    HydraProposer: "the heads",
    TranslatedDraftProposer: "the draft model",
    EarlyExitProposer: "the first layers",
    AssistantProposer: "the assistant",
}


def described(proposer: Proposer) -> str:
    """Return what drafts, in words: "n-grams and the head"."""
    parts = (proposer.ngram, proposer.other) if isinstance(proposer, HybridProposer) else (proposer,)
    return " and ".join(PROPOSERS.get(type(part), type(part).__name__) for part in parts)


class TurnMemories:
    """Gives a `SuffixProposer` a memory of its own in each turn of a measurement, a copy of the one it has now.

    Another turn or method has answered the same prompts. With a shared memory, those answers would be drafted.
    """

    def __init__(self, lookup: SuffixProposer):
        self._lookup, self._given = lookup, lookup.memory.copy()  # other methods write to the memory
        self._memories: dict[int, TextMemory] = {}
        self.use(-1)  # of the warm-up

    @classmethod
    def of(cls, proposer: Proposer | PreTrainedModel | str) -> TurnMemories | None:
        """Memories of a proposer that remembers texts of earlier calls; None for one that does not."""
        lookup = _suffixes(proposer)
        return None if lookup is None else cls(lookup)

    def use(self, turn: int) -> None:
        """Draft from the memory of this turn."""
        if turn not in self._memories:
            self._memories[turn] = self._given.copy()
        self._lookup.memory = self._memories[turn]


@dataclass(frozen=True)
class Method:
    """A way to generate.

    Attributes:
        name: name for tables.
        generate: function with the arguments of `model.generate()`.
        spec: the speculative generator; None for plain decoding and other libraries.
        code: code that builds it.
        memories: memories of earlier texts; None for a proposer without one.
    """

    name: str
    generate: Callable[..., Any]
    spec: SpeculativeGenerator | None = None
    code: str = ""
    memories: TurnMemories | None = None

    def start(self, turn: int) -> None:
        """Prepare for a call in this turn. A prompt is answered once per turn."""
        if self.memories is not None:
            self.memories.use(turn)


def plain(target: PreTrainedModel, name: str = PLAIN) -> Method:
    return Method(name, target.generate, code="model.generate()")


def speculative(
    name: str,
    target: PreTrainedModel,
    proposer: Proposer | PreTrainedModel | str,
    length: int | None = None,
    rule: RuleName = COUPLED,
    code: str = "...",
    exact: bool = False,
) -> Method:
    """Make a method of specdec. A call without speculation is an error, as it would be measured as plain decoding.

    Args:
        length: fixed draft length.
        code: code of the proposer.
    """
    spec = SpeculativeGenerator(
        target, _apart(proposer), draft_length=length, rule=rule, exact=exact, on_unsupported="error"
    )
    code += "" if length is None else f", draft_length={length}"
    code += "" if rule == COUPLED else f', rule="{rule}"'
    code += ", exact=True" if exact else ""
    return Method(name, spec.generate, spec, f"SpeculativeGenerator(model, {code})", TurnMemories.of(spec.proposer))


def _apart(proposer: Proposer | PreTrainedModel | str) -> Proposer | PreTrainedModel | str:
    """Copy a proposer that has a memory, because other methods may share it."""
    if _suffixes(proposer) is None:
        return proposer
    made = copy(proposer)
    if isinstance(made, HybridProposer):
        made.ngram = copy(made.ngram)
    return made


def _suffixes(proposer: Proposer | PreTrainedModel | str) -> SuffixProposer | None:
    """The part of a proposer that remembers texts of earlier calls; None if it has none."""
    lookup = proposer.ngram if isinstance(proposer, HybridProposer) else proposer
    return lookup if isinstance(lookup, SuffixProposer) else None


def methods(target: PreTrainedModel, proposer: Proposer | PreTrainedModel | str) -> list[Method]:
    """List the methods of a proposer: plain decoding, the proposer itself, its parts if a hybrid, chains and trees.

    Chains and trees are drafted without a hybrid's n-grams. There are trees only if a model drafts and the target
    supports them.
    """
    code = f'"{proposer}"' if isinstance(proposer, str) else "proposer"
    found = [plain(target, "plain decoding"), speculative("as it comes", target, proposer, code=code)]
    assert found[1].spec is not None
    drafts = found[1].spec.proposer

    def coded(shape: str = "") -> str:
        return code_of(drafts, proposer, target, shape)

    if isinstance(drafts, HybridProposer):
        for part in (drafts.ngram, drafts.other):
            name = f"{described(part)} alone"
            found.append(speculative(name, target, part, code=code_of(part, proposer, target)))
        drafts = drafts.other
    for length in CHAINS:
        chain, code = drafts, coded()
        if isinstance(drafts, AutoregressiveProposer) and (drafts.tree or drafts.branching):
            chain, code = drafts.shaped(branching=(1,) * length), coded(f"branching=(1,) * {length}")
        found.append(speculative(f"chain of {length}", target, chain, length, code=code))
    if isinstance(drafts, AutoregressiveProposer) and capability(target).trees:
        for size in TREE_SIZES:
            # As wide as the proposer's own trees, whose width suits its model.
            shape = DynamicTree(TREE_DEPTH, (drafts.tree or DynamicTree()).top_k, size)
            tree, code = drafts.shaped(tree=shape), coded(f"tree={shape}")
            found.append(speculative(f"tree of {size} nodes", target, tree, TREE_DEPTH, code=code))
    return found
