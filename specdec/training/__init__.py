"""Training heads, EAGLE-3's and drafters of blocks: from a target and texts that it wrote to what drafts for it."""

from specdec.training.initialisation import initialize
from specdec.training.recipe import Recipe
from specdec.training.run import train
from specdec.training.teacher import LocalTeacher
from specdec.training.trainer import HeadTrainer

__all__ = ["HeadTrainer", "LocalTeacher", "Recipe", "initialize", "train"]
