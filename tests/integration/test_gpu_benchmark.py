"""benchmarks/gpu at the size of a test, and what it stands on: models that count, and replays."""

import json
import signal
import time
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from torch.autograd import DeviceType
from typer.testing import CliRunner

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import kernels, parts, run, setting
from benchmarks.gpu.calls import pass_bytes, write
from benchmarks.gpu.results import Results, tables
from benchmarks.harness import counting
from benchmarks.harness.replay import Replay, recorded
from specdec import DynamicTree, SpeculativeGenerator
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
    output = write(model, ids, NEW)
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
    plain = write(target, ids, 160)
    replay = Replay(recorded(plain, [0, 0, 0]), right, 512)
    spec = SpeculativeGenerator(target, replay, draft_length=4)
    assert write(spec, ids, 160).tolist() == plain.tolist()
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
        assert write(way, ids, NEW).tolist() == counting.counted(ids, NEW, 512)
    assert alone.report.draft_acceptance_rate < 0.5
    assert spec.report.draft_acceptance_rate > 0.9
    assert spec.report.num_draft_passes > 0


def test_a_replay_replaces_the_path_to_a_trees_deepest_node(target):
    ids = counting.prompts(2, 9, 512, CPU)
    texts = counting.counted(ids, NEW + 16, 512)
    inner = Eagle3Proposer(counting.head_for(target), tree=DynamicTree(depth=4, top_k=3, size=12))
    spec = SpeculativeGenerator(target, Replay(texts, 1.0, 512, inner), draft_length=4)
    with spec.watch() as rounds:
        assert write(spec, ids, NEW).tolist() == counting.counted(ids, NEW, 512)
    assert max(len(trace.tokens) for trace in rounds) >= 11
    assert spec.report.tokens_per_round > 2
    assert spec.report.conditional_acceptance_rate_per_pos[:2] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("name", "count"),
    [
        *[("capture", 1), ("begin", 1), ("sync", 1), ("draft_ahead", 2), ("observe", 3), ("end", 1)],
        *[("taps", 1), ("check", 1), ("drafting_model", 0)],
    ],
)
def test_a_replay_passes_calls_on(name, count):
    inner = MagicMock()
    replay, given = Replay([[1]], 1.0, 512, inner), [object() for _ in range(count)]
    getattr(replay, name)(*given)
    getattr(inner, name).assert_called_once_with(*given)


def invoked(folder, *options):
    return CliRunner().invoke(gpu.app, ["--out", str(folder), "--small", *options])


def lines(folder):
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


QUICK = ["machine", "round", "regeneration"]


def test_parts_run_in_one_process_and_in_the_order_given(tmp_path):
    result = invoked(tmp_path, "--parts", ",".join(QUICK), "--new-tokens", "64")
    assert result.exit_code == 0, result.output
    rows = lines(tmp_path)
    assert list(dict.fromkeys(row["part"] for row in rows)) == QUICK
    assert not any("failure" in row for row in rows), rows
    assert all(row["right"] == 1 for row in rows if "right" in row)
    assert "| specdec replay, 0.8 " in (tmp_path / "results.md").read_text()
    assert "aten::silu" in (tmp_path / "kernels-replay.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("part", [part for part in parts.PARTS if part not in QUICK])
def test_every_other_part_runs(part, tmp_path):
    result = invoked(tmp_path, "--parts", part)
    assert result.exit_code == 0, result.output
    rows = lines(tmp_path)
    assert len(rows) > 1
    bad = [row for row in rows if "failure" in row or row.get("right", 1) != 1 or not row.get("ok", True)]
    assert bad == []


def test_results_of_another_benchmark_stay(tmp_path):
    (tmp_path / "results.jsonl").write_text("mine")
    assert invoked(tmp_path).exit_code == 2
    assert (tmp_path / "results.jsonl").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 1


def test_an_unknown_part_is_refused(tmp_path):
    result = invoked(tmp_path, "--parts", "round,nonsense")
    assert result.exit_code == 2
    assert "nonsense" in result.output


def swallowing(_):
    """Yield a row, and then hang; the first alarm is swallowed."""
    yield {"method": "second", "batch": 1, "prompt": 2, "tokens/s": 1.5}
    while True:
        try:
            time.sleep(60)
        except BaseException:
            time.sleep(60)


def failing(_):
    yield {"method": "first", "right": 1.0}
    raise RuntimeError("no memory")


def passing(_):
    yield {"method": "third"}


def test_a_part_that_fails_takes_nothing_with_it(tmp_path, monkeypatch):
    """One that raises, one that hangs and swallows an alarm, one without a fault, one that no time is left for."""
    monkeypatch.setattr(run, "AGAIN", 0.05)
    made = {"first": (60, failing), "second": (0.2, swallowing), "third": (60, passing)}
    results, said = Results(tmp_path), []
    handler = signal.getsignal(signal.SIGALRM)
    run.run_parts(setting.Setting(CPU, True, 8, tmp_path), results, made, 60, said.append)
    run.run_parts(setting.Setting(CPU, True, 8, tmp_path), results, {"fourth": (60, passing)}, 0, said.append)
    assert signal.getsignal(signal.SIGALRM) == handler
    assert [line.rpartition(" (")[0] for line in said] == [
        "first: RuntimeError: no memory",
        "second: not done within 0 s",
        "third: done",
        "fourth: no time was left",
    ]
    assert [row["method"] for row in lines(tmp_path) if "method" in row] == ["first", "second", "third"]
    assert "**Failed: RuntimeError: no memory**" in (tmp_path / "results.md").read_text()
    assert "RuntimeError" in (tmp_path / "failure-first.txt").read_text()
    assert not (tmp_path / "hanging.txt").exists()


def test_a_lost_device_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "recover", lambda _: "the device is lost to this process: illegal address")
    said = []
    made = {"first": (60, passing), "second": (60, passing)}
    run.run_parts(setting.Setting(CPU, True, 8, tmp_path), Results(tmp_path), made, 60, said.append)
    assert said[-1] == "stopped: the device is lost to this process: illegal address"
    assert {row["part"] for row in lines(tmp_path)} == {"first"}
    assert "illegal address" in (tmp_path / "results.md").read_text()


def test_a_profile_that_fails_is_a_row(target, tmp_path):
    given = setting.Setting(CPU, True, 24, tmp_path)
    ids = given.prompts(target)
    rows = list(kernels.kernel_rows(given, "short", given.replay(target, ids), ids, 1.0))
    assert [row["failure"].partition(":")[0] for row in rows] == ["profile"]
    assert not torch.autograd.profiler._is_profiler_enabled
    given.new_tokens = 64
    summary, *found = kernels.kernel_rows(given, "long", given.replay(target, ids), ids, 100.0)
    assert summary["kernels a round"] > 100
    assert len(found) == kernels.LISTED


def test_floors_are_of_the_bytes_that_a_pass_reads(target):
    embedding = target.get_input_embeddings().weight
    weights = sum(weight.nbytes for weight in target.parameters()) - embedding.nbytes
    read = 3 * 100 * 2 * 4 * 2 * 16 * 4  # rows, tokens, keys and values, layers, heads, head_dim, bytes of float32
    assert pass_bytes(target, 3, 100)["pass GB"] == pytest.approx((weights + read) / 1e9)
    tied = counting.counting("qwen3-4b", CPU, small=True, tie_word_embeddings=True)
    every = sum(weight.nbytes for weight in tied.parameters())
    assert pass_bytes(tied, 1, 0)["pass GB"] == pytest.approx(every / 1e9)


def test_tables_compare_with_the_same_run():
    same = {"part": "p", "model": "m", "batch": 1, "prompt": 8, "new": 4}
    rows = [
        {"part": "machine", "GB/s": 3200.0},
        {**same, "method": "generate(), eager", "ms a token": 20.0},
        {**same, "method": "ours", "ms a token": 5.0, "pass GB": 16.0, "tokens a pass": 2.0, "warned": ["slow"]},
        {**same, "batch": 2, "method": "other", "ms a token": 5.0},
    ]
    text = tables(rows)
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    head, ours, other = (next(row for row in cells if name in row) for name in ("model", "ours", "other"))
    assert dict(zip(head, ours, strict=True))["over eager"] == "4"
    assert dict(zip(head, ours, strict=True))["floor ms a token"] == "2.5"
    assert dict(zip(head, other, strict=True))["over eager"] == "-"
    assert "Warning of ours: slow" in text


def test_a_profile_counts_kernels_and_idle_time():
    def event(name, start, end, device=DeviceType.CUDA):
        return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end), device_type=device)

    events = [event("gemm", 0, 1000), event("gemm", 2000, 3000), event("norm", 2500, 4000)]
    events.append(event("cudaGraphLaunch", 0, 5, DeviceType.CPU))
    profile = kernels.read(events, 2, cuda=True)
    assert profile.busy_ms == 1.5
    assert profile.idle_ms == 0.5
    assert profile.per_round(*kernels.LAUNCHES) == 0.5
    assert profile.by_name()[0] == {"kernel": "gemm", "ms a round": 1.0, "times a round": 1.0, "us each": 1000.0}


def test_without_a_gpu_it_asks_for_small(tmp_path):
    result = CliRunner().invoke(gpu.app, ["--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "--small" in result.output
