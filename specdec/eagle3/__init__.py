"""The EAGLE-3 head: the module, its checkpoints, and how it runs beside a target."""

from specdec.eagle3.checkpoint import load, save
from specdec.eagle3.config import Eagle3Config
from specdec.eagle3.head import Eagle3Head

__all__ = ["Eagle3Config", "Eagle3Head", "load", "save"]
