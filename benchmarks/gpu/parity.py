"""Tests of the repository on the device, in a process of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

from benchmarks.gpu.setting import Row, Setting

ROOT = Path(__file__).resolve().parents[2]
SPARE = 5.0  # seconds of the part that the tests do not get
TESTS = [
    "tests/unit/models/test_cuda_graphs.py",
    "tests/unit/engine/test_calls.py",
    "tests/parity/test_parity.py",
    "tests/parity/test_sampling.py",
]


def parity(setting: Setting) -> Iterator[Row]:
    """Run tests that compare texts with plain decoding, and write what they say to parity.txt."""
    tests = ["tests/unit/engine/test_trace.py"] if setting.small else TESTS
    # `addopts` demands plugins that may be missing here.
    options = [
        "-q",
        "-rf",
        "-o",
        "addopts=",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
        "--device",
        setting.device.type,
    ]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    setting.free()
    start, file = perf_counter(), setting.out / "parity.txt"
    seconds = max(SPARE, setting.end - start - SPARE) if setting.end < float("inf") else None
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}  # so that a run that is cut off leaves its output
    with file.open("w") as out:
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, timeout=seconds
            )
            found = f"exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            found = f"not done within {seconds:.0f} s"
    said = file.read_text(errors="replace")
    progress = "".join(re.findall(r"^([.FEsx]+)(?: +\[ *\d+%\])?$", said, re.MULTILINE))
    counts = {"passed": progress.count("."), "failed": progress.count("F") + progress.count("E")}
    last = said.strip().splitlines()[-1:] or [""]
    yield {"tests": len(tests), "s": perf_counter() - start, **counts, "found": found, "summary": last[0].strip("= ")}
    for line in said.splitlines():
        if line.startswith(("FAILED", "ERROR ")):
            yield {"table": "failed tests", "test": line[:300]}
