"""`specdec train`: trains a draft head for a target."""

from __future__ import annotations

import os
from pathlib import Path
from time import monotonic

import typer

from specdec.cli import options
from specdec.cli.common import check, print_message, resumable
from specdec.data.survey import survey
from specdec.training.run_folder import RunFolder
from specdec.utils.choices import HeadKind, LossName, OptimizerName, Sharding, StepWeights, Tracker


def train(
    target: options.Target,
    data: Path = typer.Argument(
        help="Texts to train on, best the target's answers, which `regenerate` writes: JSONL (.gz), .txt, or a "
        "datasets folder.",
        exists=True,
    ),
    out: Path = typer.Argument(help="Folder for states, checkpoints and the head. An unfinished run in it is resumed."),
    kind: HeadKind = typer.Option(
        "eagle3",
        help='Kind of head: "eagle3"; "dflash", "jetspec" or "dspark" (drafters of whole blocks); "mtp" (MTP layers).',
    ),
    start_from: str | None = typer.Option(
        None, "--from", help="Head to start from: folder or hub id. Default: a new head."
    ),
    start_from_target: str | None = typer.Option(
        None,
        "--from-target",
        help="Target of the head of --from, if it is another one: a smaller model with the same tokens.",
    ),
    draft_vocab: int | None = typer.Option(
        None,
        min=2,
        help="Size of the draft vocabulary. Default: the 8192 most frequent tokens, all tokens for MTP layers, or "
        "those of the head of --from. A larger size adds tokens to that head; a smaller one chooses them again.",
    ),
    intermediate_size: int | None = typer.Option(None, min=1, help="Width of the head's MLP. Default: the target's."),
    layers: int | None = typer.Option(None, min=1, help="Layers of a new head. Default: 1; 2 for a drafter of blocks."),
    attention_bias: bool = typer.Option(
        True,
        help="Biases in a new head's attention if the target has them. SafeAILab's and SGLang's code supports none.",
    ),
    steps: int | None = typer.Option(None, min=1, help="Draft tokens to train. Default: 3; 7 for a drafter of blocks."),
    anchors: int = typer.Option(64, min=1, help="Blocks trained on per row of texts."),
    loss: LossName | None = typer.Option(
        None,
        help='Loss: "ce", cross-entropy; "lk", the likelihood of acceptance, to fine-tune a head; "ce+lk", half of '
        'each; "tv", total variation, the default for "dspark".',
    ),
    step_weights: StepWeights = typer.Option(
        "decay",
        help='Weights of the steps in the loss: "decay", a constant part of the step before; "d-pace", by how likely a '
        "step is reached and followed.",
    ),
    optimizer: OptimizerName | None = typer.Option(
        None, help='Optimizer: "muon" for matrices (default, except for MTP layers), or "adamw" for all weights.'
    ),
    length: int = typer.Option(512, min=8, help="Tokens per packed row."),
    epochs: float = typer.Option(2.0, min=0.0, help="Number of passes over the texts."),
    learning_rate: float = typer.Option(1e-3, min=0.0, help="Peak learning rate."),
    batch_size: int = typer.Option(4, min=1, help="Rows per update, over all processes."),
    rows_at_once: int | None = typer.Option(None, min=1, help="Rows per process and pass; fewer need less memory."),
    cache_states: bool = typer.Option(
        False,
        "--cache-states",
        help="Keep the target's states on disk, so that several epochs need only one pass of the target.",
    ),
    rounded_states: bool = typer.Option(
        False,
        "--rounded-states",
        help="Compute these states in 8 bits: faster on CPUs with int8 instructions, with errors of a few percent.",
    ),
    shard: Sharding = typer.Option(
        "none",
        help='Placement of the target: "none", a copy in each process; "devices", split over all devices of one '
        'process (device_map); "tp" or "fsdp", split over the processes.',
    ),
    teacher: str | None = typer.Option(
        None,
        help="http://HOST:PORT of `specdec serve-states`, which runs the target. Its files are needed here, too.",
    ),
    flex: bool = typer.Option(False, "--flex", help="Use flex attention, for long rows on CUDA."),
    max_texts: int | None = typer.Option(None, min=1, help="Maximum number of texts."),
    held_out: int = typer.Option(
        16, min=1, help="Number of texts, spread evenly over the data, to hold out for evaluation."
    ),
    held_out_data: Path | None = typer.Option(
        None, help="File of texts for evaluation only; no texts of DATA are then held out.", exists=True
    ),
    save_every: int = typer.Option(100, min=1, help="Updates between checkpoints."),
    evaluate_every: int = typer.Option(
        500,
        min=0,
        help="Updates between evaluations by decoding; 0: none, the loss on held-out texts selects the head.",
    ),
    max_minutes: float | None = typer.Option(
        None,
        min=0.0,
        help="Time limit in minutes, evaluations and checkpoints included. Run the same command again to resume.",
    ),
    report_to: Tracker = typer.Option("none", help="Experiment tracker for the logged values."),
    seed: int = typer.Option(0, min=0, max=2**32 - 1, help="Random seed."),
    device: str | None = typer.Option(
        None, help='Device: only "cpu" can be given. Default: an accelerator if there is one.'
    ),
    dry_run: bool = typer.Option(
        False,
        "--dry-run",
        help="Check the texts and OUT, print the memory, disk space and work needed, evaluations included, and stop.",
    ),
) -> None:
    """Train a head for a target: EAGLE-3, DFlash, JetSpec, DSpark or MTP. Run the same command again to resume."""
    options = {name: value for name, value in locals().items() if name != "dry_run"}
    started = monotonic()
    check(target)
    RunFolder(out).check()
    again = "stopped: run the same command again" + ("" if dry_run else " to resume from the last checkpoint")
    with resumable(lambda: again):
        if os.environ.get("RANK", "0") == "0":  # of several processes one reads the texts
            survey(data, held_out_data)  # finds broken lines before anything is loaded
        from accelerate import PartialState

        from specdec.training.evaluate import HeldOut
        from specdec.training.recipe import Recipe
        from specdec.training.run import train as train_head

        recipe = Recipe(**options)
        if dry_run:
            from specdec.training.plan import plan

            typer.echo(plan(recipe).summary())
            return
        found = train_head(recipe, started=started)
    if not PartialState().is_main_process:
        return
    if found is None:
        typer.echo("not finished yet: run the same command again to resume")
        return
    if isinstance(found, HeldOut):
        typer.echo(f"held-out texts: loss {found.loss:.3f}, simulated length {found.simulated_length:.2f}; not decoded")
    else:
        typer.echo(
            f"mean acceptance length on held-out prompts: {found.tree_length:.2f} with trees at T=0, "
            f"{found.tree_length_sampled:.2f} at T=1; chains of {recipe.drafted}: "
            f"{found.mean_acceptance_length:.2f}, simulated {found.simulated_length:.2f}"
        )
        if found.warning:
            print_message(found.warning, "warning")
    name = kind if kind in ("eagle3", "mtp") else "dflash"
    typer.echo(f"the head is in {out / 'head'}: SpeculativeGenerator(model, '{name}:{out / 'head'}')")
