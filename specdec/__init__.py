"""specdec: speculative decoding for Hugging Face models; the output of `model.generate()` in fewer target passes."""

from specdec.namesake import refuse_namesake

refuse_namesake()  # before anything of it is imported

from specdec.generator import SpeculativeGenerator
from specdec.proposers import (
    Context,
    DraftModelProposer,
    Eagle3Proposer,
    HybridProposer,
    NgramProposer,
    Proposer,
    SuffixProposer,
    TextMemory,
)
from specdec.report import Report
from specdec.rounds import Round
from specdec.support import Unsupported
from specdec.tree import DraftTree, DynamicTree, Verdict

__version__ = "0.1.0"
__all__ = [
    "Context",
    "DraftModelProposer",
    "DraftTree",
    "DynamicTree",
    "Eagle3Proposer",
    "HybridProposer",
    "NgramProposer",
    "Proposer",
    "Report",
    "Round",
    "SpeculativeGenerator",
    "SuffixProposer",
    "TextMemory",
    "Unsupported",
    "Verdict",
]
