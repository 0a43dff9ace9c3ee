"""`CostStore`: measured pass costs, kept between processes in the cache folder, one small file per kind of call.

A file that cannot be read or written is ignored. Pacing then measures from scratch, as with SPECDEC_KEEP_COSTS=0.
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
from specdec.proposers.pacing.estimates import DraftCost
from specdec.proposers.pacing.pass_cost import BUCKETS, SIZES, PassCost
from specdec.utils.paths import cache_folder

FORMAT = 2  # version of the file format: costs are relative to a pass over one node
CHANGE = 1.25  # factor by which a cost must differ from the stored one before the file is rewritten
UNSURE = 2  # largest count of passes taken from a file, so that new observations weigh more


class CostStore:
    """Stores the costs of calls of one kind: a target, a batch size and a drafting model.

    Args:
        target: the target model. Models of the same shape share a file, whatever their weights.
        batch_size: the number of rows.
        drafting: the model that makes the drafts, if there is one.
        captured: True if passes are CUDA graphs of a few padded sizes.
        exact: True if passes give each node the bits of plain decoding.
        row_kernels: True if plain decoding computes by row-independent kernels for this, which costs less.
    """

    def __init__(
        self,
        target: nn.Module,
        batch_size: int,
        drafting: nn.Module | None = None,
        captured: bool = False,
        exact: bool = False,
        row_kernels: bool = False,
    ):
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
        if exact:
            self._of["exact"] = True
        if row_kernels:
            self._of["row_kernels"] = True
        self._draft = drafting and shape(drafting)
        self._passes: dict[int, float] = {}  # stored costs by nodes per row, relative to a pass over one node
        self._step = 0.0  # stored cost of a draft pass, likewise; 0: none is stored

    def read(self) -> tuple[PassCost, DraftCost]:
        """Read the costs that earlier processes measured; empty estimates if there is no readable file."""
        file = self._read()
        passes = PassCost(file["passes"], self._sizes)
        if passes.seen():
            self._passes = _relative(passes)
        self._step = file["steps"].get(self._draft, 0.0)
        return passes, DraftCost(self._step) if self._step else DraftCost()

    def keep(self, passes: PassCost, draft: DraftCost) -> None:
        """Write the measured costs, if they differ enough from the stored ones."""
        if not passes.known or not _wanted():
            return
        found, step = _relative(passes), draft.step if draft.known else self._step
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
        """The file of this kind of call."""
        return cache_folder() / "costs" / f"{_digest(self._of)}.json"

    def _read(self) -> dict[str, Any]:
        """Read the file's tables; empty ones if the file is missing or damaged."""
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
        """Replace the file atomically, since other processes may read or write it."""
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
        except (OSError, RuntimeError):  # no folder, no space, no permission, no home directory
            pass


def shape(model: nn.Module) -> str:
    """Digest of the properties that determine a pass's cost: modules, weight shapes and dtypes, attention kernel."""
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
    """The part of a weight that this process holds."""
    return weight.to_local() if hasattr(weight, "to_local") else weight


def _digest(described: Any) -> str:
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:24]


def _wanted() -> bool:
    return os.environ.get("SPECDEC_KEEP_COSTS") != "0"


def _relative(passes: PassCost) -> dict[int, float]:
    return {size: cost for size, (cost, _) in passes.seen().items()}


def _changed(now: float, before: float | None) -> bool:
    return not before or not 1 / CHANGE < now / before < CHANGE
