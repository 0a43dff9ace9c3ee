"""Proposers: one file each behind the `Proposer` protocol."""

from specdec.proposers.base import Context, Proposer
from specdec.proposers.block import BlockProposer
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.eagle3 import Eagle3Proposer
from specdec.proposers.early_exit import EarlyExitProposer
from specdec.proposers.hybrid import HybridProposer
from specdec.proposers.hydra import HydraProposer
from specdec.proposers.lookup import Lookup
from specdec.proposers.mtp import MtpProposer
from specdec.proposers.ngram import NgramProposer
from specdec.proposers.suffix import SuffixProposer
from specdec.proposers.text_memory import TextMemory
from specdec.proposers.translated import TranslatedDraftProposer

__all__ = [
    "BlockProposer",
    "Context",
    "DraftModelProposer",
    "Eagle3Proposer",
    "EarlyExitProposer",
    "HybridProposer",
    "HydraProposer",
    "Lookup",
    "MtpProposer",
    "NgramProposer",
    "Proposer",
    "SuffixProposer",
    "TextMemory",
    "TranslatedDraftProposer",
]
