"""Runs a function in several processes that know of each other (gloo), each of which hands back what it returned."""

import importlib
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 250  # seconds: processes that wait for each other for ever are ended


def together(worker: str, folder: Path, size: int = 2, patience: int = PATIENCE) -> list[Any]:
    """What `worker(rank, folder)` returned in each process; raises with their output where one failed or hung.

    worker: "module:function". patience: in seconds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tests.support.ranks", worker, str(folder)]
    known = {"WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1", "SPECDEC_KEEP_COSTS": "0", "HF_HUB_OFFLINE": "1"}
    logs = [folder / f"{rank}.log" for rank in range(size)]
    running = []
    for rank, log in enumerate(logs):
        environment = {**os.environ, **known, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with log.open("w") as file:
            running.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file))
    try:
        codes = [process.wait(patience) for process in running]
    except subprocess.TimeoutExpired:
        codes = ["hung"]
    finally:
        for process in running:
            process.kill()
            process.wait()
    if codes != [0] * size:
        said = "\n".join(f"--- rank {rank}\n{log.read_text()[-3000:]}" for rank, log in enumerate(logs))
        raise RuntimeError(f"processes ended with {codes}\n{said}")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]


def main(worker: str, folder: Path) -> None:
    module, _, function = worker.partition(":")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.distributed.init_process_group(
        "gloo", f"file://{folder}/meeting", rank=rank, world_size=size, timeout=timedelta(seconds=PATIENCE)
    )
    torch.save(getattr(importlib.import_module(module), function)(rank, folder), folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
