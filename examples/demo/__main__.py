"""`python -m examples.demo`: the demo on the command line, also run by `make demo`."""

from __future__ import annotations

from pathlib import Path

import torch
import typer
from rich.console import Console

from examples.demo import parts, room, weights
from examples.demo.loading import load, locate
from examples.demo.show import SECONDS, Show
from specdec.data.prompts import PROMPTS
from specdec.engine.generator import SpeculativeGenerator
from specdec.heads import registry
from specdec.models.hardware import best_device, crowded, number_format, summary
from specdec.proposers.factory import as_proposers
from specdec.utils.choices import PROPOSERS_IN_WORDS, WITH_NGRAMS, check_name

SVG_COLUMNS = 88
ONE_GB = 10**9  # Python, torch and the caches

app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)


@app.command()
def main(
    target: str = typer.Option("", help="Path or hub id of the target. Default: Qwen2.5-Coder-0.5B-Instruct."),
    proposer: str = typer.Option("", help=f"Proposer: {PROPOSERS_IN_WORDS}. Default: all that suit the target."),
    pair: bool = typer.Option(False, "--pair", help="Use Qwen2.5-Coder-1.5B-Instruct, also with the 0.5B as draft."),
    small: bool = typer.Option(False, "--small", hidden=True, help="The default, accepted for older commands."),
    max_new_tokens: int | None = typer.Option(
        None, min=1, help="Length of each text. Default: 128, or fewer to stay within five minutes."
    ),
    prompt: str = typer.Option("", help=f"Run only one prompt: {', '.join(prompt.name for prompt in PROMPTS)}."),
    svg: Path | None = typer.Option(None, help="Save the screen output to this SVG file, too.", dir_okay=False),
    dtype: str = typer.Option("auto", help="Number format: auto, bfloat16, float16 or float32."),
) -> None:
    """Show plain and speculative decoding side by side on three prompts."""
    console = Console(highlight=False) if svg is None else Console(highlight=False, record=True, width=SVG_COLUMNS)
    chosen = [one for one in PROMPTS if prompt in ("", one.name)]
    if not chosen:
        raise typer.BadParameter(f"there is no prompt {prompt!r}", param_hint="--prompt")
    try:
        if proposer:
            check_name(proposer)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--proposer") from error
    target, proposers = choose(target, proposer, pair)
    try:
        require_room(own_weights(target, *proposers), dtype)
        show = prepare(console, target, proposers, max_new_tokens, dtype)
    except (weights.UnknownWeights, room.NoRoom, parts.DownloadFailed, OSError, ValueError, ImportError) as error:
        console.print(f"error: {error}", style="red", markup=False)
        raise typer.Exit(1) from error
    show.run(chosen)
    if svg is not None:
        svg.parent.mkdir(parents=True, exist_ok=True)
        console.save_svg(str(svg), title=f"specdec: {Path(target).name}")


def choose(target: str, proposer: str, pair: bool) -> tuple[str, list[str]]:
    """Choose the target and the proposers from the command line's options."""
    if not target:
        target = weights.TARGET if pair else weights.DRAFT
    if proposer:
        return target, [proposer]
    # Good proposers are known only for the demo's own targets.
    models = ["eagle3"] if registry.at_hand(target, "eagle3", download=True) else []
    models += [f"draft:{weights.DRAFT}"] if target == weights.TARGET else []
    return target, [*(WITH_NGRAMS + model for model in models), *models, "ngram"]


def own_weights(target: str, *proposers: str) -> list[str]:
    """Return those of the models that the demo must fetch itself."""
    names = dict.fromkeys([target, *(proposer.partition(":")[2] for proposer in proposers)])
    return [name for name in names if name in weights.MODELS]


def require_room(names: list[str], dtype: str) -> None:
    """Raise `room.NoRoom`, before anything is downloaded, unless the models can be fetched and run."""
    itemsize = number_format(dtype, best_device()).itemsize
    running = sum(weights.lookup(name).parameters for name in names) * itemsize + ONE_GB
    weights.require_room(names, running=running if names else 0)


def prepare(console: Console, target: str, proposers: list[str], max_new_tokens: int | None, dtype: str) -> Show:
    """Fetch and load the models."""
    if max_new_tokens is None:
        console.print(
            f"loading and probing the models, then generating texts for about {SECONDS // 60:.0f} minutes at most"
        )
    if others := crowded(best_device()):
        console.print(others, style="yellow")
    model, tokenizer = load(locate(target), dtype)
    measured = summary(model.device) if dtype == "auto" else ""
    why = f": {measured}" if measured else ""
    console.print(f"target: {target}, {str(model.dtype).removeprefix('torch.')} on {model.device}{why}")

    made = as_proposers([_located(proposer) for proposer in proposers], model)
    generators = {name.partition(":")[0]: SpeculativeGenerator(model, proposer) for name, proposer in made.items()}
    if torch.finfo(model.dtype).bits < 32 and model.device.type == "cpu":
        first = next(iter(generators))
        generators[f"{first}, exact"] = generators[first].options(exact=True)
    return Show(model, tokenizer, generators, console, max_new_tokens)


def _located(proposer: str) -> str:
    """Replace the name of one of the demo's own models by its path, after fetching it if needed."""
    kind, colon, source = proposer.partition(":")
    return kind + colon + (locate(source) if source else "")


if __name__ == "__main__":
    app()
