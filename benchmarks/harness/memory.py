"""Peak memory of a method, in its own process, so that memory left over does not affect the next measurement.

`tracemalloc` does not see torch's tensors; the kernel's high-water mark of the resident set does.
"""

from __future__ import annotations

import json
import pickle
import resource
import subprocess
import sys
from base64 import b64decode, b64encode
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.measure import measure_job
from benchmarks.harness.methods import catalogue
from benchmarks.harness.options import Bench, Options


def peak_memory(options: Options, method: str) -> dict[str, float]:
    """Measure memory in MiB after loading (`loaded`), the peak while generating (`peak`), and the difference.

    Uses the first job, after a warm-up. The difference is called `generating`. Without /proc, `peak` includes loading.
    """
    return run_apart(__spec__.name, b64encode(pickle.dumps((options, method))).decode())


def _measure(options: Options, name: str) -> dict[str, float]:
    bench = Bench(options)
    method = catalogue(bench)[name]()
    loaded = reset_peak()
    for job in (bench.warm_up, bench.jobs[0]):
        measure_job(bench, method, job)
    peak = status("VmHWM")
    if peak != peak:  # no /proc; macOS counts in bytes, others in KiB
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    figures = {"loaded": loaded, "peak": peak, "generating": peak - loaded}
    if torch.cuda.is_available():
        figures["gpu_peak"] = torch.cuda.max_memory_allocated() / 2**20
    return figures


def reset_peak() -> float:
    """Reset the high-water mark to what is resident now, and return this in MiB.

    Loading reads the weights file through the page cache and may hold the weights twice.
    """
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # Linux, proc_pid_clear_refs(5)
    return status("VmRSS")


def run_apart(module: str, *arguments: str) -> Any:
    """Run a module in its own process, so that memory left over does not affect it, and read its last line as JSON."""
    done = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"python -m {module} {arguments} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def status(field: str) -> float:
    """Read a field of /proc/self/status in MiB."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return float("nan")
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(field + ":")), float("nan"))


if __name__ == "__main__":
    print(json.dumps(_measure(*pickle.loads(b64decode(sys.argv[1])))))
