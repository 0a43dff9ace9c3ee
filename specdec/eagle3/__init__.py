"""The EAGLE-3 head: the module, its checkpoints, and how it runs beside a target.

Knows nothing of training it, which stands in `specdec.training`.
"""

from specdec.eagle3.checkpoint import load
from specdec.eagle3.config import Eagle3Config
from specdec.eagle3.head import Eagle3Head
from specdec.eagle3.layouts import save

__all__ = ["Eagle3Config", "Eagle3Head", "load", "save"]
