"""Measure specdec on a GPU: speed-up over eager and static generation, rounds, kernel launches, memory and parity.

    python -m benchmarks.gpu --out results             # on a GPU: under 8 minutes, without downloads
    python -m benchmarks.gpu --out results --small     # on any machine: tiny models, to test the script

Models have real shapes and random weights (`counting`). Acceptance is simulated (`Replay`), verification is real. Each
part runs in its own process with its own time limit, and writes a line of JSON per measurement, so that a failing or
slow part does not affect the others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from benchmarks.harness import counting, machine
from benchmarks.harness.methods import assisted as in_assisted
from benchmarks.harness.replay import Replay
from benchmarks.harness.table import number, table
from specdec import DraftModelProposer, SpeculativeGenerator
from specdec.engine.report import Report
from specdec.heads.eagle3.head import Eagle3Head
from specdec.models import static_forward as captured
from specdec.models.compat import ASSISTED_STATIC
from specdec.proposers.base import Proposer
from specdec.proposers.draft_heads.eagle3 import Eagle3Proposer

os.environ["SPECDEC_KEEP_COSTS"] = "0"

ROOT = Path(__file__).resolve().parents[1]
LENGTHS = {0.6: 3, 0.8: 6, 0.9: 8}  # tokens to draft, by the share of them that is right
MODES: dict[str, Any] = {"": False, ", recorded": "auto", ", compiled": True}  # `compile`, by the end of the name
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
Row = dict[str, Any]

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Setting:
    """Device and size of the measurements.

    Attributes:
        device: device of the models.
        small: use tiny models and short texts.
        new_tokens: new tokens per measured call.
    """

    device: torch.device
    small: bool
    new_tokens: int

    def model(self, shape: str, **changes: Any) -> PreTrainedModel:
        return counting.counting(shape, self.device, self.small, **changes)

    def prompts(self, target: PreTrainedModel, rows: int = 1, length: int | None = None) -> Tensor:
        return counting.prompts(rows, length or self.lengths()[0], target.config.vocab_size, self.device)

    def batches(self) -> tuple[int, ...]:
        return (1, 2) if self.small else (1, 4, 16, 64)

    def lengths(self) -> tuple[int, ...]:
        return (16, 32) if self.small else (128, 2048, 32000)


# Parts: each gives its measurements one by one


def bandwidth(setting: Setting) -> Iterator[Row]:
    """Measure memory bandwidth and the cost of an empty kernel, which bound the time per token from below."""
    data = torch.ones(2**20 if setting.small else 2**31, dtype=torch.bfloat16, device=setting.device)
    one = torch.ones(1, device=setting.device)
    seconds = fastest_run(setting, data.sum)
    chain = fastest_run(setting, lambda: [one.add_(1) for _ in range(1000)])
    yield {"GB/s": data.nbytes / seconds / 1e9, "us a kernel": chain * 1e3}


def methods(shape: str) -> Callable[[Setting], Iterator[Row]]:
    """Measure all methods on one row with a prompt of 128 tokens, with eager and with captured rounds."""

    def part(setting: Setting) -> Iterator[Row]:
        target = setting.model(shape)
        ids = setting.prompts(target)
        draft = setting.model(shape, wrong=0.2, num_hidden_layers=2)
        head = counting.head_for(target)
        for name, generate in plain_methods(target).items():
            yield measured(setting, target, name, generate, ids)
        for mode in ("", ", recorded"):
            for right in LENGTHS if mode else (0.8,):
                spec = replayed(setting, target, ids, right)
                yield measured_in_mode(setting, target, f"specdec replay, {right}", mode, spec, ids)
            spec = replayed(setting, target, ids, 0.8, head)
            yield measured_in_mode(setting, target, "specdec EAGLE-3 chain, 0.8", mode, spec, ids)
            spec = SpeculativeGenerator(target, DraftModelProposer(draft), draft_length=LENGTHS[0.8])
            yield measured_in_mode(setting, target, "specdec draft model, 0.8", mode, spec, ids)
        for name, generate in assisted_methods(target, draft).items():
            yield measured(setting, target, name, generate, ids)

    return part


def each_round(setting: Setting) -> Iterator[Row]:
    """Measure the duration of captured rounds in one call, and the kernels that the device runs in them."""
    target = setting.model("llama-8b")
    ids = setting.prompts(target)
    head = counting.head_for(target)
    chosen = {
        "replay, 0.8": replayed(setting, target, ids, 0.8),
        "EAGLE-3 chain, 0.8": replayed(setting, target, ids, 0.8, head),
        "EAGLE-3 tree, 0": SpeculativeGenerator(target, Eagle3Proposer(head), draft_length=8),
    }
    for name, spec in chosen.items():
        spec.compile = MODES[", recorded"]
        new = setting.new_tokens if "tree" not in name else setting.new_tokens // 4  # a token a round
        calls = [fastest_run(setting, partial(write, spec, ids, new), repeats=1) for _ in range(3)]
        rounds = rounds_of(spec, ids, new)
        row: Row = {"method": f"specdec {name}, recorded", "new tokens": new, "rounds": len(rounds)}
        row |= {f"call {i} ms": 1e3 * seconds for i, seconds in enumerate(calls, start=1)}
        yield row | {
            "median round ms": 1e3 * median(rounds),
            "slow rounds": sum(r > 1.5 * median(rounds) for r in rounds),
        }
        if setting.device.type == "cuda":
            yield from busiest(spec, ids, new)


def rounds_of(spec: SpeculativeGenerator, ids: Tensor, new: int) -> list[float]:
    """Return the seconds of each round of a call."""
    taken: list[float] = []
    record = Report.record_round

    def seen(report: Report, *args: Any) -> None:
        taken.append(args[3])
        record(report, *args)

    with patch.object(Report, "record_round", seen):
        write(spec, ids, new)
    return taken


def busiest(spec: SpeculativeGenerator, ids: Tensor, new: int) -> Iterator[Row]:
    """Yield the kernels with the most device time, per round of a call, including its prefill."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        write(spec, ids, new)
    rounds, events = spec.last_report.num_rounds, profile.key_averages()
    events = sorted(events, key=lambda event: -event.device_time_total)
    whole = sum(event.device_time_total for event in events)
    yield {"method": "all kernels", "ms a round": whole / 1e3 / rounds}
    for event in events[:8]:
        ms = event.device_time_total / 1e3 / rounds
        yield {"method": event.key[:60].replace("|", " "), "ms a round": ms, "times a round": event.count / rounds}


def compiled(setting: Setting) -> Iterator[Row]:
    """Measure captured rounds whose passes are compiled with torch.compile."""
    if setting.small:
        captured.BACKEND = "eager"  # no code is generated
    target = setting.model("llama-8b")
    ids = setting.prompts(target)
    chosen = {"replay": replayed(setting, target, ids, 0.8)}
    chosen["EAGLE-3 chain"] = replayed(setting, target, ids, 0.8, counting.head_for(target))
    for name, spec in chosen.items():
        yield measured_in_mode(setting, target, f"specdec {name}, 0.8", ", compiled", spec, ids)


def batches(setting: Setting) -> Iterator[Row]:
    target = setting.model("llama-8b")
    for rows in setting.batches():
        ids = setting.prompts(target, rows)
        yield from against_plain(setting, target, ids, static=rows == setting.batches()[-2])


def long_prompts(setting: Setting) -> Iterator[Row]:
    target = setting.model("qwen3-4b")
    for length in setting.lengths():
        ids = setting.prompts(target, length=length)
        yield from against_plain(setting, target, ids, static=length == setting.lengths()[1])


def against_plain(setting: Setting, target: PreTrainedModel, ids: Tensor, static: bool) -> Iterator[Row]:
    """Compare with plain decoding; static: also with a static cache, which takes half a minute to compile."""
    spec = replayed(setting, target, ids, 0.8)
    yield measured_in_mode(setting, target, "specdec replay, 0.8", ", recorded", spec, ids)
    for name, generate in plain_methods(target).items():
        if static or "static" not in name:
            yield measured(setting, target, name, generate, ids)


def launches(setting: Setting) -> Iterator[Row]:
    """Count kernel launches and host syncs per token or round, using torch's profiler."""
    target = setting.model("llama-8b")
    ids = setting.prompts(target)
    head = counting.head_for(target)
    chosen: dict[str, Any] = plain_methods(target)
    for mode in ("", ", recorded"):
        chosen |= {
            f"specdec replay, 0.8{mode}": replayed(setting, target, ids, 0.8),
            f"specdec EAGLE-3 chain, 0.8{mode}": replayed(setting, target, ids, 0.8, head),
            f"specdec EAGLE-3 tree, 0{mode}": SpeculativeGenerator(target, Eagle3Proposer(head), draft_length=8),
        }
    activities = torch.profiler.ProfilerActivity
    kind = activities.CUDA if setting.device.type == "cuda" else activities.CPU
    for name, method in chosen.items():
        counts, recorded = [], name.endswith(", recorded")
        if isinstance(method, SpeculativeGenerator):
            method.compile = MODES[", recorded" if recorded else ""]
        few = 32 if recorded and "tree" not in name else 12  # by then what is replayed has been recorded
        for new in (few, few + 8):  # their difference is without the prompt's part
            write(method, ids, new)
            with torch.profiler.profile(activities=[kind]) as profile:
                write(method, ids, new)
            seen = {event.key: event.count for event in profile.key_averages()}
            counts.append([sum(seen.get(key, 0) for key in keys) for keys in (LAUNCHES, WAITS)])
            counts[-1].append(passes(method, new) or 0)
        launched, waited, rounds = (b - a for a, b in zip(*counts, strict=True))
        yield {"method": name, "launches a pass": launched / rounds, "waits a pass": waited / rounds}


def parity(setting: Setting) -> Iterator[Row]:
    """Run the tests that compare texts with plain decoding on the device."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--device", setting.device.type, "-p", "no:cacheprovider"]
    full = ["tests/parity/test_parity.py", "tests/parity/test_sampling.py"]
    chosen = ["tests/unit/engine/test_trace.py"] if setting.small else full
    done = subprocess.run([*command, "-m", "not slow", *chosen], cwd=ROOT, capture_output=True, text=True)
    yield {"passed": done.returncode == 0, "summary": done.stdout.strip().splitlines()[-1:]}


PARTS: dict[str, tuple[float, Callable[[Setting], Iterator[Row]]]] = {  # seconds it may take
    "bandwidth": (30, bandwidth),
    "rounds": (60, each_round),
    "llama-8b": (120, methods("llama-8b")),
    "batches": (120, batches),
    "long prompts": (90, long_prompts),
    "launches": (60, launches),
    "qwen3-4b": (90, methods("qwen3-4b")),
    "mixture of experts": (90, methods("qwen3-30b-a3b, half its layers")),
    "parity": (90, parity),
    "compiled": (200, compiled),
}


# Methods


def plain_methods(target: PreTrainedModel) -> dict[str, Any]:
    """Plain decoding, eager and with a static cache, whose passes transformers compiles on a GPU: the baselines."""

    def static(ids: Tensor, **kwargs: Any) -> Tensor:
        return target.generate(ids, cache_implementation="static", **kwargs)

    return {"generate(), eager": target.generate, "generate(), static": static}


def assisted_methods(target: PreTrainedModel, draft: PreTrainedModel) -> dict[str, Any]:
    """transformers' assisted generation; since 5.24 also with a static cache, whose passes are compiled on a GPU."""

    def method(static: bool) -> Any:
        generate = in_assisted(target, draft, None, static)

        def assisted(ids: Tensor, **kwargs: Any) -> Tensor:
            return generate(input_ids=ids, **kwargs)

        return assisted

    return {"assisted, 0.8": method(False)} | ({"assisted, static, 0.8": method(True)} if ASSISTED_STATIC else {})


def replayed(
    setting: Setting, target: PreTrainedModel, ids: Tensor, right: float, head: Eagle3Head | None = None
) -> SpeculativeGenerator:
    """Make a generator that replays texts with `Replay`, at the cost of the head's drafts if there is one."""
    vocab_size = target.config.vocab_size
    texts = counting.counted(ids, setting.new_tokens + 64, vocab_size)
    behind: Proposer | None = None if head is None else Eagle3Proposer(head).shaped()
    return SpeculativeGenerator(target, Replay(texts, right, vocab_size, behind), draft_length=LENGTHS[right])


# Measuring


def measured_in_mode(
    setting: Setting, target: PreTrainedModel, name: str, mode: str, spec: SpeculativeGenerator, ids: Tensor
) -> Row:
    """Run `measured` with the launch mode `MODES[mode]`, and add specdec's warnings."""
    spec.compile = MODES[mode]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        row = measured(setting, target, name + mode, spec, ids)
    warned = [str(warning.message) for warning in caught if "specdec" in str(warning.message)]
    return row | ({"warned": warned} if warned else {})


def measured(setting: Setting, target: PreTrainedModel, name: str, method: Any, ids: Tensor) -> Row:
    """Measure the seconds per token after the first. method: a `generate` function, or an object that has one."""
    B, new = len(ids), setting.new_tokens
    write(method, ids, new)  # compiles, and finds out what passes cost
    first = fastest_run(setting, lambda: write(method, ids, 1))
    if setting.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    outputs: list[Tensor] = []
    whole = fastest_run(setting, lambda: outputs.append(write(method, ids, new)))
    output, count = outputs[-1], passes(method, new)
    row: Row = {
        "method": name,
        "batch": B,
        "prompt": ids.shape[1],
        "ms a token": 1e3 * (whole - first) / (new - 1),
        "tokens/s": B * (new - 1) / (whole - first),
        "tokens a pass": None if count is None else new / count,
        "first token ms": 1e3 * first,
        "right": counting.share_counted(output, ids, target.config.vocab_size),
    }
    if not hasattr(target.config, "num_experts"):  # else a pass reads a part of them
        row["weights GB"] = sum(weight.nbytes for weight in target.parameters()) / 1e9
    if setting.device.type == "cuda":
        row["memory GB"] = torch.cuda.max_memory_allocated() / 1e9
    return row


def write(method: Any, ids: Tensor, new: int) -> Tensor:
    mask = torch.ones_like(ids)
    generate = getattr(method, "generate", method)
    return generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=new, min_new_tokens=None)


def passes(method: Any, new: int) -> int | None:
    """Passes of the target in the last call, derived from its tokens, since a hook would trigger a recompilation."""
    if isinstance(method, SpeculativeGenerator):
        return method.last_report.num_rounds + 1
    return None if method.__name__ == "assisted" else new


def fastest_run(setting: Setting, work: Callable[[], Any], repeats: int = 2) -> float:
    """Seconds of the fastest run, including the device's work."""
    taken = []
    for _ in range(repeats):
        start = perf_counter()
        work()
        if setting.device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(perf_counter() - start)
    return min(taken)


# Running the parts


@app.command(help=__doc__)
def main(
    out: Annotated[Path, typer.Option(help="Folder for results.jsonl and results.md.")],
    part: Annotated[str | None, typer.Option(help="Run only this part, in this process.")] = None,
    small: Annotated[bool, typer.Option(help="Use tiny models and short texts, also on a CPU.")] = False,
    minutes: Annotated[float, typer.Option(min=0.1, help="Time limit in minutes; parts beyond it are left out.")] = 8,
    new_tokens: Annotated[int | None, typer.Option(min=8, help="New tokens per measured call.")] = None,
) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not small:
        raise typer.BadParameter("there is no GPU here: --small runs anywhere")
    if part is not None and part not in PARTS:
        raise typer.BadParameter(f"no part is called {part!r}; there are {', '.join(PARTS)}")
    out.mkdir(parents=True, exist_ok=True)
    setting = Setting(device, small, new_tokens or (16 if small else 96))
    if part is None:
        run_all(out, setting, 60 * minutes)
    else:
        logging.set_verbosity_error()
        for row in PARTS[part][1](setting):
            note(out, {"part": part, **row})


def run_all(out: Path, setting: Setting, seconds: float) -> None:
    if (out / "results.jsonl").exists() and not (out / "machine.json").exists():
        raise typer.BadParameter(f"{out / 'results.jsonl'} is not of this benchmark: choose another --out")
    (out / "results.jsonl").unlink(missing_ok=True)
    (out / "machine.json").write_text(json.dumps(machine.describe(), indent=1))
    end = perf_counter() + seconds
    for part, (most, _) in PARTS.items():
        left = min(most, end - perf_counter())
        failure = "no time was left" if left <= 0 else run_part(command(out, part, setting), left)
        if failure:
            note(out, {"part": part, "failure": failure})
        print(f"{part}: {failure or 'done'}", flush=True)
    (out / "results.md").write_text(tables(out))
    draw(out)
    print(tables(out))


def command(out: Path, part: str, setting: Setting) -> list[str]:
    options = ["--out", str(out), "--part", part, "--new-tokens", str(setting.new_tokens)]
    return [sys.executable, "-m", __spec__.name, *options, *(["--small"] if setting.small else [])]


def run_part(command: list[str], seconds: float) -> str | None:
    """Run a part in a process, and return the reason if it failed, otherwise None."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"not done within {seconds:.0f} s"
    if done.returncode == 0:
        return None
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def note(out: Path, row: Row) -> None:
    with (out / "results.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def results(out: Path) -> list[Row]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def tables(out: Path) -> str:
    """Format all measurements, with a table for each part."""
    rows = results(out)
    bandwidth = next((row["GB/s"] for row in rows if "GB/s" in row), None)
    made = []
    for part in dict.fromkeys(row["part"] for row in rows):
        mine = [with_floor(row, bandwidth) for row in rows if row["part"] == part]
        measured = [row for row in mine if "failure" not in row]
        head = list(dict.fromkeys(key for row in measured for key in row if key != "part"))
        lines = [[shown(row.get(key)) for key in head] for row in measured]
        failures = [f"Failed: {row['failure']}" for row in mine if "failure" in row]
        made.append("\n\n".join([f"## {part}", *([table(head, lines)] if lines else []), *failures]))
    return "\n\n".join(made) + "\n"


def draw(out: Path) -> None:
    """Draw the tokens per second of every method, with a panel for each part."""
    from matplotlib.figure import Figure

    rows = [row for row in results(out) if "tokens/s" in row]
    parts = list(dict.fromkeys(row["part"] for row in rows))
    if not parts:
        return
    figure = Figure(figsize=(9, 3 * len(parts)), layout="constrained")
    for panel, part in zip(figure.subplots(len(parts), squeeze=False)[:, 0], parts, strict=True):
        mine = [row for row in rows if row["part"] == part]
        names = [f"{row['method']}\n{row['batch']} x {row['prompt']}" for row in mine]
        panel.bar_label(panel.barh(names, [row["tokens/s"] for row in mine]), fmt="%.0f", fontsize=6)
        panel.set_title(part, fontsize="medium")
        panel.set_xlabel("tokens/s", fontsize="x-small")
        panel.tick_params(labelsize=6)
        panel.invert_yaxis()
    figure.savefig(out / "results.png", dpi=150)


def with_floor(row: Row, bandwidth: float | None) -> Row:
    """Add the minimum time per token: reading the weights once per pass."""
    if bandwidth is None or not row.get("tokens a pass") or "weights GB" not in row:
        return row
    return row | {"floor ms": 1e3 * row["weights GB"] / bandwidth / row["tokens a pass"]}


def shown(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "-" if value is None else str(value)
    return number(value)


if __name__ == "__main__":
    app()
