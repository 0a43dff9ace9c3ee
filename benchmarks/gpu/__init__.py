"""Measurements on a GPU, in one process: see `__main__`."""

import os

os.environ["SPECDEC_KEEP_COSTS"] = "0"
# torch sets both for its own CUDA graphs: profilers that detach between runs break replays.
os.environ.setdefault("TEARDOWN_CUPTI", "0")
os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
