"""`CostStore`: what passes cost on this machine, kept between processes in the cache folder.

Owns a small file per kind of call, and what tells machines and models apart. Knows nothing of what costs are for. What
cannot be read, or written, is as good as none: pacing then learns by itself, as it does where $SPECDEC_KEEP_COSTS is 0.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
from torch import nn

from specdec.models.hardware import name_of
from specdec.proposers.pacing.estimates import BUCKETS, SIZES, DraftCost, PassCost
from specdec.utils.paths import cache_folder

FORMAT = 1  # of the files
CHANGE = 1.25  # times what is kept: then it is worth another file
UNSURE = 2  # passes of a size that a file vouches for at most: the next ones count


class CostStore:
    """Of calls of one kind: a target, how many rows, and what drafts for it.

    Args:
        target: whose passes they are; its shape counts, not what it has learnt. batch_size: rows.
        drafting: the model that makes the drafts, if there is one. captured: passes are graphs of few sizes.
    """

    def __init__(self, target: nn.Module, batch_size: int, drafting: nn.Module | None = None, captured: bool = False):
        self._sizes = SIZES if captured else BUCKETS
        self._of = {
            "format": FORMAT,
            "torch": torch.__version__,
            "machines": sorted({name_of(weight.device) for weight in target.parameters()}),
            "threads": torch.get_num_threads(),
            "target": shape(target),
            "rows": batch_size,
        }
        if captured:
            self._of["captured"] = True
        self._draft = drafting and shape(drafting)
        self._passes: dict[int, float] = {}  # as they are kept: by nodes per row, in passes over one
        self._step = 0.0  # of the draft, likewise; 0: none is kept

    def read(self) -> tuple[PassCost, DraftCost]:
        """What earlier processes found; nothing, where they left nothing that can be read."""
        file = self._read()
        passes = PassCost(file["passes"], self._sizes)
        if passes.seen():
            self._passes = _relative(passes)
        self._step = file["steps"].get(self._draft, 0.0)
        return passes, DraftCost(self._step) if self._step else DraftCost()

    def keep(self, passes: PassCost, draft: DraftCost) -> None:
        """Write what was found, if it is news."""
        if not passes.known or not _wanted():
            return
        found, step = _relative(passes), draft.step(passes.plain) / passes.plain if draft.known else self._step
        if not self._draft:
            step = 0.0
        news = len(found) > 1 and any(_changed(cost, self._passes.get(size)) for size, cost in found.items())
        if not news and not (step and _changed(step, self._step)):
            return
        self._passes, self._step = found, step
        steps = self._read()["steps"] | ({self._draft: step} if step else {})
        self._write({"of": self._of, "passes": passes.seen(), "steps": steps})

    @property
    def path(self) -> Path:
        return cache_folder() / "costs" / f"{_digest(self._of)}.json"

    def _read(self) -> dict[str, Any]:
        """Empty tables in place of what is missing or damaged."""
        try:
            file = json.loads(self.path.read_text()) if _wanted() else {}
            passes = {int(size): (float(seconds), min(int(n), UNSURE)) for size, (seconds, n) in file["passes"].items()}
            steps = {str(draft): float(share) for draft, share in file["steps"].items()}
            numbers = [*steps.values(), *(seconds for seconds, _ in passes.values())]
            if set(passes) <= set(self._sizes) and all(isfinite(n) and n > 0 for n in numbers):
                return {"passes": passes, "steps": steps}
        except (OSError, RuntimeError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            pass
        return {"passes": {}, "steps": {}}

    def _write(self, content: Mapping[str, Any]) -> None:
        """Whole or not at all, whoever else writes or reads."""
        try:
            path = self.path
            path.parent.mkdir(parents=True, exist_ok=True)
            with NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as part:
                try:
                    part.write(json.dumps(content, indent=1))
                    part.close()
                    os.replace(part.name, path)
                except BaseException:
                    os.unlink(part.name)
                    raise
        except (OSError, RuntimeError):  # no folder, no room, no right, no home
            pass


def shape(model: nn.Module) -> str:
    """What a pass's seconds follow from: kinds of modules, sizes and types of weights, kind of attention."""
    modules = Counter(
        f"{type(module).__qualname__} "
        + ", ".join(
            f"{tuple(_here(w).shape)} {w.dtype} {w.device.type}" for w in module._parameters.values() if w is not None
        )
        for module in model.modules()
    )
    config = getattr(model, "config", None)
    return _digest([sorted(modules.items()), getattr(config, "_attn_implementation", None)])


def _here(weight: torch.Tensor) -> torch.Tensor:
    """What this process has of a weight."""
    return weight.to_local() if hasattr(weight, "to_local") else weight


def _digest(described: Any) -> str:
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:24]


def _wanted() -> bool:
    return os.environ.get("SPECDEC_KEEP_COSTS") != "0"


def _relative(passes: PassCost) -> dict[int, float]:
    return {size: seconds / passes.plain for size, (seconds, _) in passes.seen().items()}


def _changed(now: float, before: float | None) -> bool:
    return not before or not 1 / CHANGE < now / before < CHANGE
