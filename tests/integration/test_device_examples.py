"""The examples that run over several devices, as docs/devices.md shows them, on a tiny model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import tiny

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny.model("llama", num_hidden_layers=4).save_pretrained(folder)
    tiny.letters().save_pretrained(folder)
    return folder


def printed(*command):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, command)], env=environment, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_offload(model):
    output = printed(ROOT / "examples/offload.py", model)
    assert "the same text: True" in output
    assert "over 4 layers, 2 of them from disk" in output


@pytest.mark.parametrize("name", ["tensor_parallel", "fsdp_rollout"])
def test_two_processes(model, name):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    output = printed(*launch, ROOT / f"examples/{name}.py", model)
    for rank in (0, 1):
        assert f"process {rank}" in output
    assert "plain decoding's text" in output
    assert "ANOTHER TEXT" not in output
