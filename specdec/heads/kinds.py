"""`Head`: the types of heads that can be trained, and copies of them."""

from __future__ import annotations

from typing import Any

import torch

from specdec.heads.dflash.head import DFlashHead
from specdec.heads.eagle3.head import Eagle3Head
from specdec.heads.mtp.trainable import MtpTrainee

StandAlone = Eagle3Head | DFlashHead  # heads with a config of their own
Head = StandAlone | MtpTrainee


def copy_of(head: Head, dtype: torch.dtype) -> Head:
    """Return a copy of the head in another precision, in eval mode."""
    if isinstance(head, MtpTrainee):
        return head.copied(dtype)
    kind: Any = type(head)
    copy: Head = kind(head.config).to(head.device, dtype)
    copy.load_state_dict(head.state_dict())
    return copy.eval()
