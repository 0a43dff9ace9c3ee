"""specdec: speculative decoding for Hugging Face models; the output of `model.generate()` in fewer target passes."""

from specdec.generator import SpeculativeGenerator, Unsupported
from specdec.proposers import Context, DraftModelProposer, NgramProposer, Proposer
from specdec.report import Report
from specdec.tree import DraftTree, Verdict

__version__ = "0.1.0"
__all__ = [
    "Context",
    "DraftModelProposer",
    "DraftTree",
    "NgramProposer",
    "Proposer",
    "Report",
    "SpeculativeGenerator",
    "Unsupported",
    "Verdict",
]
