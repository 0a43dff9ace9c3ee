"""`Head`: the types of heads that can be trained, how they are copied and written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from specdec.heads.dflash.export import save as save_block
from specdec.heads.dflash.head import DFlashHead
from specdec.heads.eagle3.export import save as save_eagle3
from specdec.heads.eagle3.head import Eagle3Head
from specdec.heads.mtp.checkpoint import write
from specdec.heads.mtp.loading import tensors_of
from specdec.heads.mtp.trainable import MtpTrainee

StandAlone = Eagle3Head | DFlashHead  # heads with a config of their own
Head = StandAlone | MtpTrainee


def copy_of(head: Head, dtype: torch.dtype) -> Head:
    """Return a copy of the head in another precision, in eval mode."""
    if isinstance(head, MtpTrainee):
        return head.copy_to(dtype)
    kind: Any = type(head)
    copy: Head = kind(head.config).to(head.device, dtype)
    copy.load_state_dict(head.state_dict())
    return copy.eval()


def save(head: Head, folder: Path, target: str = "") -> None:
    """Write a head in the default layout of its kind.

    Args:
        head: head to write.
        folder: created if it does not exist. A head in it is replaced.
        target: name or path of the target, which some layouts record.

    Raises:
        ValueError: the folder holds another model.
    """
    if isinstance(head, DFlashHead):
        save_block(head, folder, target)
    elif isinstance(head, MtpTrainee):
        write([tensors_of(layer) for layer in head.layers], folder)
    else:
        save_eagle3(head, folder, target=target)
