"""The EAGLE-3 head: the module, its checkpoints, how it runs beside a target, and training it."""

from typing import Any

from specdec.eagle3.checkpoint import load, save
from specdec.eagle3.config import Eagle3Config
from specdec.eagle3.head import Eagle3Head

__all__ = ["Eagle3Config", "Eagle3Head", "Eagle3Trainer", "convert", "load", "save"]


def __getattr__(name: str) -> Any:
    """Training's imports take a while: only where it is asked for."""
    if name == "convert":
        from specdec.eagle3.fresh import convert

        return convert
    if name == "Eagle3Trainer":
        from specdec.eagle3.trainer import Eagle3Trainer

        return Eagle3Trainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
