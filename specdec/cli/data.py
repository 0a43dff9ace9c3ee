"""`specdec regenerate`: has a target answer prompts."""

from __future__ import annotations

import json
import os
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from pathlib import Path
from reprlib import repr as shortened
from time import monotonic, perf_counter
from typing import Any

import typer

from specdec.cli import options
from specdec.cli.common import check, load, resumable
from specdec.cli.progress import progress_bar
from specdec.data.entries import check_text
from specdec.utils.paths import check_writable, locked


def regenerate(
    target: options.Target,
    prompts: Path = typer.Argument(
        help="Prompts or conversations: JSONL (.gz), .txt with one per line, or a datasets folder.", exists=True
    ),
    out: Path = typer.Argument(
        help="JSONL file to write. Conversations finished in an earlier run are kept.", dir_okay=False
    ),
    temperature: list[float] = typer.Option(
        [0.0],
        min=0.0,
        max=options.MAX_TEMPERATURE,
        callback=lambda temperatures: list(map(options.check_temperature, temperatures)),
        help="Sampling temperature; 0 is greedy. If given several times, conversations use them in turn.",
    ),
    batch_size: int | None = typer.Option(
        None, min=1, help="Conversations answered at a time. Default: 8 on a CPU, 64 on a GPU."
    ),
    max_new_tokens: int = typer.Option(256, min=1, help="Maximum new tokens per answer."),
    max_prompt_tokens: int = typer.Option(
        1024, min=1, help="Maximum tokens of a prompt; longer conversations are left out."
    ),
    limit: int | None = typer.Option(None, min=1, help="Maximum number of prompts."),
    template: str = typer.Option(
        "{}",
        help="""JSON arguments of the chat template: '{"enable_thinking": false}'. An entry's own take precedence.""",
    ),
    max_minutes: float | None = typer.Option(
        None, min=0.0, help="Time limit in minutes, loading included. Run the same command again to resume."
    ),
    seed: int = typer.Option(0, min=-(2**53), max=2**53, help="Random seed for sampling."),
) -> None:
    """Let a target answer prompts, to get training texts for a head."""
    begun = monotonic()
    from specdec.data.answer_store import Answers
    from specdec.data.resume import asked, states_of_prompts
    from specdec.data.skipped import Skipped

    switches = _switches(template)
    check_writable(out)
    first_process = os.environ.get("RANK", "0") == "0"
    with resumable(lambda: _stopped(out)), _locked(out) if first_process else nullcontext():
        if first_process:  # of several processes one reads the files, before it loads the model
            useless = Skipped("prompts")
            useless.check(sum(1 for _ in asked(prompts, switches, useless)))
            check(target)
            first = islice(asked(prompts, switches, useless), limit)
            states_of_prompts(Answers(out), first, target, temperature, max_new_tokens)
        from accelerate.utils import gather_object

        from specdec.data.regenerate import regenerate as answer
        from specdec.models.hardware import computed_in, started_together
        from specdec.models.number_format import convert

        together = started_together()
        model, tokenizer = load(target, device=None if together.num_processes == 1 else str(together.device))
        batch_size = batch_size or (8 if model.device.type == "cpu" else 64)
        convert(model, computed_in(model.dtype, model.device, rows=[batch_size]))
        started, finished = perf_counter(), False
        with progress_bar("answers", enabled=together.is_main_process) as bar:

            def progress(done: int, total: int, tokens: int) -> None:
                nonlocal finished
                finished = done == total
                bar(done, total, f"{tokens / (perf_counter() - started):.0f} tokens/s")

            tokens = answer(
                model,
                tokenizer,
                prompts,
                out,
                temperatures=temperature,
                batch_size=batch_size,
                max_new_tokens=max_new_tokens,
                max_prompt_tokens=max_prompt_tokens,
                limit=limit,
                switches=switches,
                seed=seed,
                share=(together.process_index, together.num_processes),
                agree=lambda yes: all(gather_object([yes])),
                progress=progress,
                go_on=lambda: max_minutes is None or monotonic() - begun < 60 * max_minutes,
            )
    finished = finished and not Answers(out).parts()
    tokens = sum(gather_object([tokens]))
    if not together.is_main_process:
        return
    left_over = "" if finished else " so far: run the same command again to resume"
    typer.echo(f"the answers are in {out}{left_over}")
    if tokens:
        typer.echo(f"{tokens} tokens in {perf_counter() - started:.0f} s")
    elif finished:
        typer.echo("all prompts that can be answered had answers already")


def _locked(out: Path) -> AbstractContextManager[None]:
    out.parent.mkdir(parents=True, exist_ok=True)
    return locked(out.with_name(f".{out.name}.lock"), out)


def _stopped(out: Path) -> str:
    """One line on what an interrupted run keeps, and how to resume it."""
    from specdec.data.answer_store import Answers

    if not any(path.stat().st_size for path in Answers(out).files()):
        return "stopped before the first answer, so nothing is kept: run the same command again to start over"
    return f"stopped: the answers in {out} are kept, run the same command again to resume"


def _switches(template: str) -> dict[str, Any]:
    try:
        switches = json.loads(template)
        check_text(switches)
    except (ValueError, RecursionError):
        switches = None
    if not isinstance(switches, dict):
        raise ValueError(
            f"--template must be a JSON object, for example '{{\"enable_thinking\": false}}', got {shortened(template)}"
        )
    return switches
