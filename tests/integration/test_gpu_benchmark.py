"""benchmarks/gpu.py at the size of a test, and what it stands on: models that count, and replays."""

import json
import sys

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import gpu
from benchmarks.harness import counting
from benchmarks.harness.replay import Replay, recorded
from specdec import SpeculativeGenerator
from specdec.proposers.draft_heads.eagle3 import Eagle3Proposer

CPU = torch.device("cpu")
NEW = 40


@pytest.fixture(scope="module")
def target():
    return counting.counting("llama-8b", CPU, small=True)


@pytest.mark.parametrize("shape", counting.SHAPES)
def test_a_model_counts(shape):
    model = counting.counting(shape, CPU, small=True)
    ids = counting.prompts(2, 7, 512, CPU)
    output = gpu.write(model, ids, NEW)
    assert output.tolist() == counting.counted(ids, NEW, 512)
    assert counting.share_counted(output, ids, 512) == 1
    output[0, -10:] = 0
    assert counting.share_counted(output, ids, 512) == pytest.approx(70 / 80, abs=1 / 80)


def test_a_draft_model_counts_but_for_a_share(target):
    draft = counting.counting("llama-8b", CPU, small=True, wrong=0.25, num_hidden_layers=1)
    every = torch.arange(512)[:, None]
    with torch.no_grad():
        right = (draft(every).logits[:, 0].argmax(-1) == (every[:, 0] + 1) % 512).float().mean()
    assert 0.7 < right < 0.8


@pytest.mark.parametrize("right", [0.0, 0.5, 1.0])
def test_a_replay_is_right_by_its_share(target, right):
    ids = counting.prompts(3, 9, 512, CPU)
    plain = gpu.write(target, ids, 160)
    replay = Replay(recorded(plain, [0, 0, 0]), right, 512)
    spec = SpeculativeGenerator(target, replay, draft_length=4)
    assert gpu.write(spec, ids, 160).tolist() == plain.tolist()
    first = spec.report.conditional_acceptance_rate_per_pos[0]
    assert first == pytest.approx(right, abs=0.1 if right == 0.5 else 0.0)
    assert spec.report.num_draft_tokens > 0


def test_a_replay_at_the_cost_of_a_head(target):
    ids = counting.prompts(2, 9, 512, CPU)
    texts = counting.counted(ids, NEW + 16, 512)
    head = counting.head_for(target)
    alone = SpeculativeGenerator(target, Eagle3Proposer(head).shaped(), draft_length=4)
    spec = SpeculativeGenerator(target, Replay(texts, 1.0, 512, Eagle3Proposer(head).shaped()), draft_length=4)
    for way in (alone, spec):
        assert gpu.write(way, ids, NEW).tolist() == counting.counted(ids, NEW, 512)
    assert alone.report.draft_acceptance_rate < 0.5
    assert spec.report.draft_acceptance_rate > 0.9
    assert spec.report.num_draft_passes > 0


@pytest.mark.parametrize("part", ["bandwidth", "batches"])
def test_a_part_runs(part, tmp_path):
    given = ["--out", str(tmp_path), "--part", part, "--small", "--new-tokens", "8"]
    result = CliRunner().invoke(gpu.app, given)
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert len(rows) == {"bandwidth": 1, "batches": 5}[part]
    assert all(row["right"] == 1 for row in rows if "right" in row)


@pytest.mark.slow
@pytest.mark.parametrize("part", [part for part in gpu.PARTS if part not in ("bandwidth", "batches")])
def test_every_other_part_runs(part, tmp_path):
    given = ["--out", str(tmp_path), "--part", part, "--small", "--new-tokens", "8"]
    result = CliRunner().invoke(gpu.app, given)
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert rows
    assert all(row.get("right", 1) == 1 and row.get("passed", True) for row in rows), rows


def test_results_of_another_benchmark_stay(tmp_path):
    (tmp_path / "results.jsonl").write_text("mine")
    result = CliRunner().invoke(gpu.app, ["--out", str(tmp_path), "--small"])
    assert result.exit_code == 2
    assert (tmp_path / "results.jsonl").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_part_that_fails_takes_nothing_with_it(tmp_path, monkeypatch):
    """Each is a process of its own: one that dies, one that hangs, one that measured something before it died."""
    line = json.dumps({"part": "third", "method": "m", "batch": 1, "prompt": 2, "tokens/s": 1.5})
    scripts = {
        "first": "raise SystemExit('no memory')",
        "second": "import time; time.sleep(60)",
        "third": f"open({str(tmp_path / 'results.jsonl')!r}, 'a').write({line!r} + '\\n'); 1 / 0",
        "fourth": "pass",
    }
    monkeypatch.setattr(gpu, "PARTS", {name: (0.5 if name == "second" else 60, None) for name in scripts})
    monkeypatch.setattr(gpu, "command", lambda out, part, setting: [sys.executable, "-c", scripts[part]])
    result = CliRunner().invoke(gpu.app, ["--out", str(tmp_path), "--small"])
    assert result.exit_code == 0, result.output
    said = [line for line in result.output.splitlines() if line.split(":")[0] in scripts]
    assert said == [
        "first: no memory",
        "second: not done within 0 s",
        "third: ZeroDivisionError: division by zero",
        "fourth: done",
    ]
    tables = (tmp_path / "results.md").read_text()
    assert "| m " in tables
    assert "Failed: no memory" in tables
    assert (tmp_path / "results.png").stat().st_size > 0


def test_floors_are_of_the_bytes_that_passes_read(tmp_path):
    row = {"part": "p", "method": "m", "tokens a pass": 2.0, "weights GB": 16.0}
    assert gpu.with_floor(row, 3200.0)["floor ms"] == 2.5
    assert "floor ms" not in gpu.with_floor(row | {"tokens a pass": None}, 3200.0)
    assert "floor ms" not in gpu.with_floor(row, None)


def test_without_a_gpu_it_asks_for_small(tmp_path):
    result = CliRunner().invoke(gpu.app, ["--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "--small" in result.output
