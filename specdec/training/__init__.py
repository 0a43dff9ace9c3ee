"""Training EAGLE-3 heads: from a target and texts that it wrote to a head that drafts for it."""

from specdec.training.initialisation import initialize
from specdec.training.recipe import Recipe
from specdec.training.run import train
from specdec.training.trainer import Eagle3Trainer

__all__ = ["Eagle3Trainer", "Recipe", "initialize", "train"]
