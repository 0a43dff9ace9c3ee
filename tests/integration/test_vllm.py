"""A head that specdec exports, in vLLM: it accepts there what it accepts here, at every position of a draft.

`make test-vllm` installs vLLM's build for CPUs into an environment of its own (3.4 GB) and runs this; without it, and
without the model, the test is skipped.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from examples.demo import weights
from examples.demo.loading import load
from specdec import Eagle3Proposer, SpeculativeGenerator
from specdec.cli.app import app
from specdec.data.prompts import PROMPTS, Prompt
from specdec.heads import registry

PYTHON = os.environ.get("VLLM_PYTHON", "")
LENGTH, TOKENS = 3, 64
MORE = (
    Prompt("rivers", "Name three rivers and, for each of them, a town on its banks."),
    Prompt(
        "train", "A train leaves at 9:40 and arrives at 13:05. It stops twice, 10 minutes each. How long does it move?"
    ),
    Prompt("sql", "Write a SQL query that lists the ten customers who spent the most last year, and explain it."),
)
IN_VLLM = Path(__file__).parents[2] / "benchmarks" / "regression" / "in_vllm.py"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.model,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not PYTHON, reason="vLLM has an environment of its own: `make test-vllm`"),
]


def test_an_exported_head_accepts_in_vllm_what_it_accepts_here(tmp_path):
    folder = weights.cached(weights.DRAFT)
    if folder is None:
        pytest.skip(f"needs `python -m examples.demo.weights {weights.DRAFT}`")
    target, tokenizer = load(str(folder), "float32")
    head = registry.find(target, "eagle3")
    prompts = [prompt.encode(tokenizer) for prompt in (*PROMPTS, *MORE)]

    exported = ["export", str(head), str(tmp_path / "head"), "--layout", "speculators", "--target", str(folder)]
    assert CliRunner().invoke(app, exported).exit_code == 0
    (tmp_path / "prompts.json").write_text(json.dumps([prompt["input_ids"][0].tolist() for prompt in prompts]))
    theirs = in_vllm(folder, tmp_path / "head", tmp_path / "prompts.json")

    chains = Eagle3Proposer(head, branching=(1,) * LENGTH)
    spec = SpeculativeGenerator(target, chains, draft_length=LENGTH, on_unsupported="error")
    texts = [spec.generate(**prompt, do_sample=False, max_new_tokens=TOKENS)[0].tolist() for prompt in prompts]
    news = [text[len(prompt["input_ids"][0]) :] for text, prompt in zip(texts, prompts, strict=True)]
    same = sum(ours == other for ours, other in zip(news, theirs["texts"], strict=True))
    ours = torch.tensor(spec.report.acceptance_rate_per_pos[:LENGTH])
    vllm = torch.tensor(theirs["accepted"]) / theirs["drafts"]
    print(f"\n{same} of {len(texts)} texts are the same")
    for name, rates in (("specdec", ours), ("vLLM", vllm)):
        print(
            f"{name}: {1 + float(rates.sum()):.2f} tokens a round; by position {[round(r, 3) for r in rates.tolist()]}"
        )
    assert (ours - vllm).abs().max() < 0.06  # of some 220 drafts; rounding and ends of texts
    assert same >= len(texts) - 2  # near ties fall otherwise where sums are rounded otherwise


def in_vllm(target: Path, head: Path, prompts: Path) -> dict:
    names = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | names
    command = [PYTHON, str(IN_VLLM), str(target), str(head), str(prompts)]
    command += ["--draft-length", str(LENGTH), "--max-new-tokens", str(TOKENS)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200, check=False)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-3000:]
    (line,) = [line for line in run.stdout.splitlines() if line.startswith("FOUND ")]
    return json.loads(line.removeprefix("FOUND "))
