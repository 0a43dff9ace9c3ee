"""specdec: speculative decoding for Hugging Face models; the output of `model.generate()` in fewer target passes.

Public names are imported on first access, so that the command line can check its arguments before it imports torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from specdec.utils.moved import RENAMED, find_old_modules, warn_of_old_name
from specdec.utils.namesake import refuse_namesake
from specdec.utils.releases import note_release

refuse_namesake()  # before any submodule is imported
find_old_modules()

if TYPE_CHECKING:
    from specdec.engine.chat import Chat
    from specdec.engine.generator import SpeculativeGenerator
    from specdec.engine.hf.eligibility import Unsupported
    from specdec.engine.lenient import Lenient
    from specdec.engine.report import Report
    from specdec.engine.trace import RoundTrace
    from specdec.proposers.base import Proposer
    from specdec.proposers.context import Context
    from specdec.proposers.draft_heads.block import BlockProposer
    from specdec.proposers.draft_heads.eagle3 import Eagle3Proposer
    from specdec.proposers.draft_heads.hydra import HydraProposer
    from specdec.proposers.draft_heads.mtp import MtpProposer
    from specdec.proposers.draft_models.assistant import AssistantProposer
    from specdec.proposers.draft_models.draft_model import DraftModelProposer
    from specdec.proposers.draft_models.early_exit import EarlyExitProposer
    from specdec.proposers.draft_models.translated import TranslatedDraftProposer
    from specdec.proposers.hybrid import HybridProposer
    from specdec.proposers.lookup.ngram import NgramProposer
    from specdec.proposers.lookup.suffix import SuffixProposer
    from specdec.proposers.lookup.text_memory import TextMemory
    from specdec.sampling.draft_tree import DraftTree
    from specdec.sampling.dynamic_tree import DynamicTree
    from specdec.sampling.grammar import GrammarProcessor, GrammarState
    from specdec.sampling.results import RoundResult
else:
    _FILES = {
        "AssistantProposer": "proposers.draft_models.assistant",
        "BlockProposer": "proposers.draft_heads.block",
        "Chat": "engine.chat",
        "Context": "proposers.context",
        "DraftModelProposer": "proposers.draft_models.draft_model",
        "DraftTree": "sampling.draft_tree",
        "DynamicTree": "sampling.dynamic_tree",
        "Eagle3Proposer": "proposers.draft_heads.eagle3",
        "EarlyExitProposer": "proposers.draft_models.early_exit",
        "GrammarProcessor": "sampling.grammar",
        "GrammarState": "sampling.grammar",
        "HybridProposer": "proposers.hybrid",
        "HydraProposer": "proposers.draft_heads.hydra",
        "Lenient": "engine.lenient",
        "MtpProposer": "proposers.draft_heads.mtp",
        "NgramProposer": "proposers.lookup.ngram",
        "Proposer": "proposers.base",
        "Report": "engine.report",
        "RoundResult": "sampling.results",
        "RoundTrace": "engine.trace",
        "SpeculativeGenerator": "engine.generator",
        "SuffixProposer": "proposers.lookup.suffix",
        "TextMemory": "proposers.lookup.text_memory",
        "TranslatedDraftProposer": "proposers.draft_models.translated",
        "Unsupported": "engine.hf.eligibility",
    }

    def __getattr__(name):
        if name in RENAMED:
            warn_of_old_name(f"specdec.{name}", f"specdec.{RENAMED[name]}")
            name = RENAMED[name]
        if name not in _FILES:
            raise AttributeError(f"module 'specdec' has no attribute {name!r}")
        try:
            found = globals()[name] = getattr(import_module(f"specdec.{_FILES[name]}"), name)
        except ImportError as error:  # a release of transformers or torch without a name that we import
            note_release(error)
            raise
        return found

    def __dir__():
        return sorted({*globals(), *__all__})


__version__ = "0.1.0"
__all__ = [
    "AssistantProposer",
    "BlockProposer",
    "Chat",
    "Context",
    "DraftModelProposer",
    "DraftTree",
    "DynamicTree",
    "Eagle3Proposer",
    "EarlyExitProposer",
    "GrammarProcessor",
    "GrammarState",
    "HybridProposer",
    "HydraProposer",
    "Lenient",
    "MtpProposer",
    "NgramProposer",
    "Proposer",
    "Report",
    "RoundResult",
    "RoundTrace",
    "SpeculativeGenerator",
    "SuffixProposer",
    "TextMemory",
    "TranslatedDraftProposer",
    "Unsupported",
]
