"""specdec: speculative decoding for Hugging Face models; the output of `model.generate()` in fewer target passes.

Names are imported when they are first asked for: the command line checks what it was given before torch is there.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from specdec.namesake import refuse_namesake
from specdec.releases import note_release

refuse_namesake()  # before anything of it is imported

if TYPE_CHECKING:
    from specdec.generator import SpeculativeGenerator
    from specdec.lenient import Lenient
    from specdec.proposers import (
        BlockProposer,
        Context,
        DraftModelProposer,
        Eagle3Proposer,
        EarlyExitProposer,
        HybridProposer,
        HydraProposer,
        MtpProposer,
        NgramProposer,
        Proposer,
        SuffixProposer,
        TextMemory,
        TranslatedDraftProposer,
    )
    from specdec.report import Report
    from specdec.rounds import Round
    from specdec.support import Unsupported
    from specdec.tree import DraftTree, DynamicTree, Verdict
else:
    _FILES = {
        "BlockProposer": "proposers",
        "Context": "proposers",
        "DraftModelProposer": "proposers",
        "DraftTree": "tree",
        "DynamicTree": "tree",
        "Eagle3Proposer": "proposers",
        "EarlyExitProposer": "proposers",
        "HybridProposer": "proposers",
        "HydraProposer": "proposers",
        "Lenient": "lenient",
        "MtpProposer": "proposers",
        "NgramProposer": "proposers",
        "Proposer": "proposers",
        "Report": "report",
        "Round": "rounds",
        "SpeculativeGenerator": "generator",
        "SuffixProposer": "proposers",
        "TextMemory": "proposers",
        "TranslatedDraftProposer": "proposers",
        "Unsupported": "support",
        "Verdict": "tree",
    }

    def __getattr__(name):
        if name not in _FILES:
            raise AttributeError(f"module 'specdec' has no attribute {name!r}")
        try:
            found = globals()[name] = getattr(import_module(f"specdec.{_FILES[name]}"), name)
        except ImportError as error:  # a release of transformers or torch that lacks a name we import
            note_release(error)
            raise
        return found

    def __dir__():
        return sorted({*globals(), *__all__})


__version__ = "0.1.0"
__all__ = [
    "BlockProposer",
    "Context",
    "DraftModelProposer",
    "DraftTree",
    "DynamicTree",
    "Eagle3Proposer",
    "EarlyExitProposer",
    "HybridProposer",
    "HydraProposer",
    "Lenient",
    "MtpProposer",
    "NgramProposer",
    "Proposer",
    "Report",
    "Round",
    "SpeculativeGenerator",
    "SuffixProposer",
    "TextMemory",
    "TranslatedDraftProposer",
    "Unsupported",
    "Verdict",
]
