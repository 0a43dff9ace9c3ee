"""`Head`: the kinds of heads that are trained, and copies of them."""

from __future__ import annotations

from typing import Any

import torch

from specdec.heads.dflash.head import DFlashHead
from specdec.heads.eagle3.head import Eagle3Head
from specdec.heads.mtp.trainable import MtpTrainee

StandAlone = Eagle3Head | DFlashHead  # with a config of its own
Head = StandAlone | MtpTrainee


def copy_of(head: Head, dtype: torch.dtype) -> Head:
    """The same head in another precision."""
    if isinstance(head, MtpTrainee):
        return head.copied(dtype)
    kind: Any = type(head)
    copy: Head = kind(head.config).to(head.device, dtype)
    copy.load_state_dict(head.state_dict())
    return copy.eval()
