"""Description of the machine and the software of a measurement."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path
from typing import Any

import torch
import transformers

import specdec
from specdec.utils.releases import installed


def describe() -> dict[str, Any]:
    """Return the processor, cores, threads and versions."""
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": round(_memory_gb(), 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "specdec": specdec.__version__,
        "specdec_source": source_digest(),
        "scikit-learn": installed("scikit-learn")
        or None,  # with it, transformers adapts the assistant's confidence threshold
        "threads": torch.get_num_threads(),
    }


def cpu_model() -> str:
    """CPU model from the kernel, since `platform.processor()` is empty or an architecture on Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def source_digest() -> str:
    """Hash of specdec's source code, to identify measurements taken between releases."""
    digest = hashlib.sha256()
    for path in sorted(Path(specdec.__file__).parent.rglob("*.py")):
        if "demo" not in path.parts:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _memory_gb() -> float:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (ValueError, OSError, AttributeError):
        return float("nan")
