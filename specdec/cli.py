"""The command line: thin commands over the library."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import typer

from specdec.proposers.named import PROPOSERS_IN_WORDS, check_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specdec.proposers import Proposer

WHAT_DRAFTS = f"What drafts: {PROPOSERS_IN_WORDS}."
NUMBER_FORMAT = "auto (what is fastest here, in place of bfloat16), bfloat16, float16 or float32."

format_of_others = warnings.formatwarning

app = typer.Typer(help="Speculative decoding for Hugging Face models.", no_args_is_help=True, add_completion=False)


@contextmanager
def _bad_input_ends() -> Iterator[None]:
    """What the library says of bad input, without a traceback; exit code 2."""
    try:
        yield
    except (ValueError, OSError) as error:  # OSError: no such model or file
        typer.secho(f"error: {error}", fg="red", err=True)
        raise typer.Exit(2) from error


def _load(target: str, tokenizer: bool = True, dtype: str | None = None) -> tuple[PreTrainedModel, Any]:
    """The model on the best device there is, and its tokenizer.

    Args:
        dtype: number format by its name, "auto" for what is fastest here, which is said; None: as saved.
    """
    from transformers import AutoTokenizer

    from specdec.machine import best_device, format_for, number_format
    from specdec.proposers.draft_model import load

    if dtype is not None:
        number_format(dtype, best_device())  # raises, before the model is loaded, if there is no such format
    model = load(target).to(best_device())
    if dtype is not None:
        chosen, why = format_for(dtype, model.dtype, model.device, model.num_parameters())
        model = model.to(chosen)
        typer.echo(f"computing in {str(chosen).removeprefix('torch.')} on {model.device}: {why}", err=True)
    return model, AutoTokenizer.from_pretrained(target) if tokenizer else None


def _drafting(proposer: str, target: PreTrainedModel) -> Proposer | str:
    """What `proposer` names; a draft model in the target's number format, and on its device."""
    from specdec.proposers import DraftModelProposer, HybridProposer
    from specdec.proposers.draft_model import load
    from specdec.proposers.named import WITH_NGRAMS

    kind, _, source = proposer.partition(":")
    if not kind.endswith("draft"):
        return proposer
    made = DraftModelProposer(load(source).to(target.device, target.dtype))
    return HybridProposer(made) if kind.startswith(WITH_NGRAMS) else made


def _in_words(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Warnings of ours without the line of code that gave them."""
    ours = Path(filename).is_relative_to(Path(__file__).parent)
    return f"warning: {message}\n" if ours else format_of_others(message, category, filename, lineno, line)


@app.callback()
def main() -> None:
    """Speculative decoding for Hugging Face models."""
    warnings.formatwarning = _in_words


@app.command()
def generate(
    target: str = typer.Argument(help="Path or hub id of the target model."),
    prompt: str = typer.Argument(help="What to say to it; goes through the chat template where the model has one."),
    proposer: str = typer.Option("ngram", help=WHAT_DRAFTS),
    max_new_tokens: int = typer.Option(256, min=1, help="Tokens to write at most."),
    temperature: float = typer.Option(0.0, min=0.0, help="0 is greedy."),
    dtype: str = typer.Option("auto", help=NUMBER_FORMAT),
) -> None:
    """Write a continuation token by token, then print the report."""
    from transformers import TextStreamer

    from specdec import SpeculativeGenerator
    from specdec.data.prompts import Prompt

    with _bad_input_ends():
        check_name(proposer)
        model, tokenizer = _load(target, dtype=dtype)
        spec = SpeculativeGenerator(model, _drafting(proposer, model))
    inputs = Prompt("", prompt).encode(tokenizer, model.device)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    spec.generate(
        **inputs,
        max_new_tokens=max_new_tokens,
        streamer=TextStreamer(tokenizer, skip_prompt=True),
        **sampling,
    )
    typer.echo(f"\n{spec.last_report}")


@app.command()
def inspect(
    head: str = typer.Argument(help="Folder or hub id of an EAGLE head."),
    target: str | None = typer.Option(None, help="Path or hub id of its target, to check that they fit."),
    probe: bool = typer.Option(False, help="Measure which way of counting the target's layers is right."),
) -> None:
    """Say what an EAGLE head's files hold, which of it is used, and what had to be assumed."""
    from specdec.eagle3.checkpoint import read
    from specdec.eagle3.inspection import describe
    from specdec.proposers import Eagle3Proposer
    from specdec.tap_probe import probe_taps

    if probe and target is None:
        raise typer.BadParameter("--probe needs --target", param_hint="--probe")
    with _bad_input_ends():
        checkpoint = read(head)
        typer.echo(describe(checkpoint))
        module = checkpoint.head()
        if target is None:
            return
        model, tokenizer = _load(target, tokenizer=probe)
        proposer = Eagle3Proposer(module.to(model.device))
        proposer.check(model)
        typer.echo(f"\nIt fits {target} and reads the states entering its layers {proposer.taps(model).at}.")
        if probe:
            typer.echo(probe_taps(module, model, tokenizer))


@app.command()
def export(
    head: str = typer.Argument(help="Folder or hub id of an EAGLE-3 head, in any known layout."),
    out: str = typer.Argument(help="Folder to write."),
    layout: str = typer.Option(
        "sglang", help='"sglang" (SafeAILab, SpecForge, SGLang), "speculators" (vLLM) or "int8" (half the size, ours).'
    ),
    target: str = typer.Option("", help="Hub id of the target, which vLLM's layout names."),
) -> None:
    """Write an EAGLE-3 head in another layout."""
    from specdec.eagle3 import load, save
    from specdec.eagle3.layouts import lost_in

    with _bad_input_ends():
        if Path(out).resolve() == Path(head).resolve():
            raise ValueError(f"{out} is the head itself, which would be lost: choose another folder")
        loaded = load(head)
        save(loaded, out, layout, target)
    for lost in lost_in(loaded.config, layout):
        typer.secho(f"warning: {lost}", fg="yellow", err=True)
    if layout == "speculators" and not target:
        typer.secho("warning: vLLM looks the target up in this layout's config: give --target", fg="yellow", err=True)
    size = (Path(out) / "model.safetensors").stat().st_size
    typer.echo(f"{out}: {size / 1e6:.1f} MB in the layout {layout}")


@app.command()
def regenerate(
    target: str = typer.Argument(help="Path or hub id of the target model."),
    prompts: Path = typer.Argument(
        help="Prompts or conversations: JSONL (.gz), .txt, one a line, or a datasets folder.", exists=True
    ),
    out: Path = typer.Argument(
        help="JSONL to write; conversations finished in an earlier run are kept.", dir_okay=False
    ),
    temperature: list[float] = typer.Option([0.0], help="May be given several times: conversations take turns."),
    batch_size: int = typer.Option(8, min=1, help="Conversations at a time."),
    max_new_tokens: int = typer.Option(256, min=1, help="Tokens per answer at most."),
    max_prompt_tokens: int = typer.Option(1024, min=1, help="Longer conversations are left out."),
    limit: int | None = typer.Option(None, min=1, help="Use the first so many prompts."),
    max_minutes: float | None = typer.Option(None, min=0.0, help="Stop after them; the same command goes on."),
    seed: int = typer.Option(0),
) -> None:
    """Have a target answer prompts: the texts that a head for it is trained on."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from specdec.data.conversations import read_prompts
    from specdec.data.regenerate import regenerate as answer
    from specdec.machine import computed_in

    with _bad_input_ends():
        for _ in read_prompts(prompts):
            pass  # a broken line is said before the model is loaded
        model, tokenizer = _load(target)
        model = model.to(computed_in(model.dtype, model.device, rows=[batch_size]))
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"), TimeRemainingColumn())
        with Progress(*columns) as bar:
            task, started = bar.add_task("answers", total=None, speed=""), perf_counter()

            def progress(done: int, total: int, tokens: int) -> None:
                speed = f"{tokens / (perf_counter() - started):.0f} tokens/s"
                bar.update(task, completed=done, total=total, speed=speed)

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
                seed=seed,
                progress=progress,
                go_on=lambda: max_minutes is None or perf_counter() - started < 60 * max_minutes,
            )
            finished = bar.finished
    left_over = "" if finished else " so far: the same command goes on"
    typer.echo(f"the answers are in {out}{left_over}")
    typer.echo(f"{tokens} tokens in {perf_counter() - started:.0f} s" if tokens else "nothing was left to answer")


@app.command()
def train(
    target: str = typer.Argument(help="Path or hub id of the target model."),
    data: Path = typer.Argument(help="Texts it wrote itself: JSONL (.gz), .txt, or a datasets folder.", exists=True),
    out: Path = typer.Argument(help="Folder for states, checkpoints and the head; work in it is taken up."),
    start_from: str | None = typer.Option(
        None, "--from", help="A head to go on from, folder or hub id: not a fresh one."
    ),
    start_from_target: str | None = typer.Option(
        None, "--from-target", help="What the head of --from is for, if another: a smaller model with the same tokens."
    ),
    draft_vocab: int | None = typer.Option(
        None, min=2, help="Tokens that can be drafted: the most frequent 8192; with --from, those it has and more."
    ),
    intermediate_size: int | None = typer.Option(None, min=1, help="Width of the head's MLP; the target's by default."),
    attention_bias: bool = typer.Option(
        True,
        help="Biases in a fresh head's attention if the target's has them; SafeAILab's and SGLang's code takes none.",
    ),
    steps: int = typer.Option(3, min=1, help="Drafted tokens to train (training-time test)."),
    loss: str = typer.Option(
        "ce", help='"ce": cross-entropy; "lk": the likelihood of acceptance, to go on from a head with.'
    ),
    length: int = typer.Option(512, min=8, help="Tokens per packed row."),
    epochs: float = typer.Option(2.0, min=0.0),
    learning_rate: float = typer.Option(1e-3, min=0.0),
    batch_size: int = typer.Option(4, min=1, help="Rows per update, of all processes."),
    rows_at_once: int | None = typer.Option(None, min=1, help="Rows per process and pass: fewer need less memory."),
    cache_states: bool = typer.Option(
        False, "--cache-states", help="Keep the target's states on disk: several epochs then cost one pass of it."
    ),
    flex: bool = typer.Option(False, "--flex", help="Flex attention: for CUDA and long rows."),
    max_texts: int | None = typer.Option(None, min=1, help="Use the first so many texts."),
    held_out: int = typer.Option(16, min=1, help="Texts, evenly over the data, only evaluated on."),
    held_out_data: Path | None = typer.Option(
        None, help="Texts only evaluated on, in a file of their own; nothing of DATA is held out then.", exists=True
    ),
    save_every: int = typer.Option(100, min=1, help="Updates between checkpoints."),
    evaluate_every: int = typer.Option(500, min=1, help="Updates between evaluations by the decoder."),
    max_minutes: float | None = typer.Option(
        None, min=0.0, help="Stop after them, up to ten updates or an evaluation later; the same command goes on."
    ),
    seed: int = typer.Option(0),
    device: str | None = typer.Option(None, help='"cpu"; by default an accelerator if there is one.'),
) -> None:
    """Train an EAGLE-3 head for a target. The same command goes on where it was stopped."""
    options = dict(locals())
    from accelerate import PartialState

    from specdec.training import Recipe
    from specdec.training import train as train_head

    with _bad_input_ends():
        found = train_head(Recipe(**options))
    if not PartialState().is_main_process:
        return
    if found is None:
        typer.echo("not finished yet: the same command goes on")
        return
    typer.echo(
        f"mean acceptance length on held-out prompts: {found.tree_length:.2f} with trees at T=0, "
        f"{found.tree_length_sampled:.2f} at T=1; chains of {steps}: {found.mean_acceptance_length:.2f}, simulated "
        f"{found.simulated_length:.2f}"
    )
    if found.warning:
        typer.secho(f"warning: {found.warning}", fg="yellow", err=True)
    typer.echo(f"the head is in {out / 'head'}: SpeculativeGenerator(model, 'eagle3:{out / 'head'}')")


@app.command()
def doctor(
    target: str = typer.Argument(help="Path or hub id of the target model."),
    proposer: str = typer.Argument(help=WHAT_DRAFTS),
    prompts: Path | None = typer.Option(
        None, help="Your prompts: .txt, one a line, or as for `regenerate`; two of ours by default.", exists=True
    ),
    limit: int = typer.Option(8, min=1, help="Use the first so many prompts."),
    max_new_tokens: int = typer.Option(64, min=8, help="Tokens to write for each."),
    temperature: float = typer.Option(0.0, min=0.0, help="0 is greedy."),
    dtype: str = typer.Option("auto", help=NUMBER_FORMAT),
) -> None:
    """Measure plain decoding and every way to draft, in turns: which is fastest on these prompts, what limits it."""
    import torch
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from specdec.data.conversations import encode_prompt
    from specdec.data.prompts import PROMPTS
    from specdec.doctor import diagnose, first_questions

    with _bad_input_ends():
        check_name(proposer)
        asked, count = first_questions(prompts, limit) if prompts else ([], 0)
        model, tokenizer = _load(target, dtype=dtype)
        theirs = [torch.tensor(encode_prompt(messages, tokenizer)) for messages in asked]
        ours = [prompt.encode(tokenizer)["input_ids"][0] for prompt in PROMPTS[:2]]
        sampling = {"do_sample": True, "temperature": temperature} if temperature else {}
        columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=None)
            found = diagnose(
                model,
                _drafting(proposer, model),
                theirs or ours,
                usual=ours if theirs else (),
                max_new_tokens=max_new_tokens,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
                **sampling,
            )
    used = f"{len(theirs)} of {count:,}" if count > len(theirs) else f"{count:,}"
    of_whom = f"{used} prompts of {prompts}" if prompts else f"{len(ours)} prompts of ours"
    typer.echo(f"measured on {of_whom}, up to {max_new_tokens} new tokens each, in whole calls\n")
    typer.echo(found.in_words())


if __name__ == "__main__":
    app()
