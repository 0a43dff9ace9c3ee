"""`Method`: a decoding method that the doctor measures.

That is plain decoding, a proposer with its own settings, or its drafts in one fixed shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from specdec.engine.generator import SpeculativeGenerator
from specdec.models.capability import capability
from specdec.proposers.base import Proposer
from specdec.proposers.draft_heads.block import BlockProposer
from specdec.proposers.draft_heads.eagle3 import Eagle3Proposer
from specdec.proposers.draft_heads.hydra import HydraProposer
from specdec.proposers.draft_heads.mtp import MtpProposer
from specdec.proposers.draft_models.autoregressive import AutoregressiveProposer
from specdec.proposers.draft_models.draft_model import DraftModelProposer
from specdec.proposers.hybrid import HybridProposer
from specdec.proposers.lookup.ngram import NgramProposer
from specdec.proposers.lookup.suffix import SuffixProposer
from specdec.sampling.dynamic_tree import DynamicTree

CHAINS = (2, 4, 8)  # tokens; the last one gives the acceptance rates by position
TREE_DEPTH, TREE_SIZES = 6, (8, 24, 60)
LOOKUPS: dict[type, str] = {NgramProposer: '"ngram"', SuffixProposer: '"suffix"'}
MODEL_OF: dict[type, str] = {
    DraftModelProposer: "DRAFT",
    Eagle3Proposer: "HEAD",
    MtpProposer: "",
    BlockProposer: "HEAD",
    HydraProposer: "HEAD",
}  # name of the model in `Method.code`


@dataclass(frozen=True)
class Method:
    """A way to generate text for a prompt.

    Attributes:
        name: name for tables.
        code: code that builds it.
        generate: `generate` of the target or of the speculative generator.
        spec: the speculative generator; None for plain decoding.
    """

    name: str
    code: str
    generate: Callable[..., Any]
    spec: SpeculativeGenerator | None = None


def methods(target: PreTrainedModel, proposer: Proposer | PreTrainedModel | str) -> list[Method]:
    """List the methods for a proposer: plain decoding, the proposer itself, its parts if a hybrid, chains and trees.

    Chains and trees are drafted without a hybrid's n-grams. There are trees only if a model drafts and the target
    supports them.
    """

    def method(name: str, drafts: Proposer | PreTrainedModel | str, code: str, length: int | None = None) -> Method:
        spec = SpeculativeGenerator(target, drafts, draft_length=length, on_unsupported="error")
        fixed = "" if length is None else f", draft_length={length}"
        return Method(name, f"SpeculativeGenerator(model, {code}{fixed})", spec.generate, spec)

    whole = method("as it comes", proposer, f'"{proposer}"' if isinstance(proposer, str) else "proposer")
    assert whole.spec is not None
    drafts = whole.spec.proposer
    found = [Method("plain decoding", "model.generate()", target.generate), whole]
    if isinstance(drafts, HybridProposer):
        found.append(method(f"{_name(drafts.ngram)} alone", drafts.ngram, _code(drafts.ngram)))
        drafts = drafts.other
        found.append(method(f"{_name(drafts)} alone", drafts, _code(drafts)))
    found += [
        method(f"chain of {length}", _chain(drafts, length), _chain_code(drafts, length), length) for length in CHAINS
    ]
    if isinstance(drafts, AutoregressiveProposer) and capability(target).trees:
        for size in TREE_SIZES:
            # As wide as the proposer's own trees, whose width suits its model.
            shape = DynamicTree(TREE_DEPTH, (drafts.tree or DynamicTree()).top_k, size)
            code = _code(drafts, f"tree={shape}")
            found.append(method(f"tree of {size} nodes", drafts.shaped(tree=shape), code, TREE_DEPTH))
    return found


def chain(target: PreTrainedModel, proposer: Proposer, length: int = CHAINS[-1]) -> SpeculativeGenerator:
    """Return a generator that drafts chains of one length, without a hybrid's n-grams."""
    drafts = proposer.other if isinstance(proposer, HybridProposer) else proposer
    return SpeculativeGenerator(target, _chain(drafts, length), draft_length=length, on_unsupported="error")


def _drafts_trees(proposer: Proposer) -> bool:
    """Return True if a model drafts trees by its own settings."""
    return isinstance(proposer, AutoregressiveProposer) and (
        proposer.tree is not None or proposer.branching is not None
    )


def _chain(proposer: Proposer, length: int) -> Proposer:
    """Return the same proposer drafting chains."""
    if isinstance(proposer, AutoregressiveProposer) and _drafts_trees(proposer):
        return proposer.shaped(branching=(1,) * length)
    return proposer


def _chain_code(proposer: Proposer, length: int) -> str:
    return _code(proposer, f"branching=(1,) * {length}" if _drafts_trees(proposer) else "")


def _code(proposer: Proposer, shape: str = "") -> str:
    """Code that builds the proposer with a shape argument."""
    if type(proposer) in LOOKUPS:
        return LOOKUPS[type(proposer)]
    model = MODEL_OF.get(type(proposer), "...")
    return f"{type(proposer).__name__}({', '.join(part for part in (model, shape) if part)})"


def _name(proposer: Proposer) -> str:
    names: dict[type, str] = {
        Eagle3Proposer: "the head",
        MtpProposer: "the MTP layers",
        DraftModelProposer: "the draft model",
    }
    names |= {HydraProposer: "the heads", BlockProposer: "the drafter"}
    names |= {NgramProposer: "n-grams", SuffixProposer: "suffixes"}
    return names.get(type(proposer), type(proposer).__name__)
