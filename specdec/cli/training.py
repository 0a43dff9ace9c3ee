"""`specdec train`: a head for a target."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from specdec.cli.common import Target, check, interrupted
from specdec.utils.choices import HeadKind, LossName, OptimizerName, Sharding, Tracker

if TYPE_CHECKING:
    from specdec.training.evaluate import Evaluation


def train(
    target: Target,
    data: Path = typer.Argument(help="Texts it wrote itself: JSONL (.gz), .txt, or a datasets folder.", exists=True),
    out: Path = typer.Argument(help="Folder for states, checkpoints and the head; work in it is taken up."),
    kind: HeadKind = typer.Option(
        "eagle3", help='"eagle3"; a drafter of whole blocks, "dflash" or "dspark"; MTP layers, "mtp".'
    ),
    start_from: str | None = typer.Option(
        None, "--from", help="A head to go on from, folder or hub id: not a fresh one."
    ),
    start_from_target: str | None = typer.Option(
        None, "--from-target", help="What the head of --from is for, if another: a smaller model with the same tokens."
    ),
    draft_vocab: int | None = typer.Option(
        None,
        min=2,
        help="Tokens that can be drafted: the most frequent 8192; more than a head of --from has are added to its own, "
        "else they are chosen anew.",
    ),
    intermediate_size: int | None = typer.Option(None, min=1, help="Width of the head's MLP; the target's by default."),
    layers: int | None = typer.Option(None, min=1, help="Of a fresh head: 1, of a drafter of blocks 2."),
    attention_bias: bool = typer.Option(
        True,
        help="Biases in a fresh head's attention if the target's has them; SafeAILab's and SGLang's code takes none.",
    ),
    steps: int | None = typer.Option(None, min=1, help="Drafted tokens to train: 3, of a drafter of blocks 7."),
    anchors: int = typer.Option(64, min=1, help="Blocks to learn from in each row of texts."),
    loss: LossName | None = typer.Option(
        None,
        help='"ce": cross-entropy; "lk": the likelihood of acceptance, to go on from a head with; "ce+lk": half of '
        'each; "tv": total variation, the default for "dspark".',
    ),
    optimizer: OptimizerName | None = typer.Option(
        None, help='"muon" for matrices (an EAGLE-3 head\'s default), or "adamw" for all weights.'
    ),
    length: int = typer.Option(512, min=8, help="Tokens per packed row."),
    epochs: float = typer.Option(2.0, min=0.0),
    learning_rate: float = typer.Option(1e-3, min=0.0),
    batch_size: int = typer.Option(4, min=1, help="Rows per update, of all processes."),
    rows_at_once: int | None = typer.Option(None, min=1, help="Rows per process and pass: fewer need less memory."),
    cache_states: bool = typer.Option(
        False, "--cache-states", help="Keep the target's states on disk: several epochs then cost one pass of it."
    ),
    rounded_states: bool = typer.Option(
        False,
        "--rounded-states",
        help="Compute those states in 8 bits: faster on CPUs that multiply bytes, a few percent off.",
    ),
    shard: Sharding = typer.Option(
        "none",
        help='Where the target lies: "none": whole in each process; "devices": over all of one process (device_map); '
        '"tp", "fsdp": over the processes.',
    ),
    teacher: str | None = typer.Option(
        None, help="http://HOST:PORT of `specdec serve-states`: the target is run there, its weights lie here, too."
    ),
    flex: bool = typer.Option(False, "--flex", help="Flex attention: for CUDA and long rows."),
    max_texts: int | None = typer.Option(None, min=1, help="Use the first so many texts."),
    held_out: int = typer.Option(16, min=1, help="Texts, evenly over the data, only evaluated on."),
    held_out_data: Path | None = typer.Option(
        None, help="Texts only evaluated on, in a file of their own; nothing of DATA is held out then.", exists=True
    ),
    save_every: int = typer.Option(100, min=1, help="Updates between checkpoints."),
    evaluate_every: int = typer.Option(
        500, min=0, help="Updates between evaluations by the decoder; 0: none, the loss on held-out texts decides."
    ),
    max_minutes: float | None = typer.Option(
        None, min=0.0, help="Stop after them, up to ten updates or an evaluation later; the same command goes on."
    ),
    report_to: Tracker = typer.Option("none", help="A tracker that is sent what is logged too."),
    seed: int = typer.Option(0, min=0, max=2**32 - 1),
    device: str | None = typer.Option(None, help='"cpu"; by default an accelerator if there is one.'),
    dry_run: bool = typer.Option(
        False,
        "--dry-run",
        help="Say what memory, disk and work it takes, and do nothing: no weights are read.",
    ),
) -> None:
    """Train a head for a target: EAGLE-3, DFlash, DSpark, MTP. The same command goes on where it was stopped."""
    options = {name: value for name, value in locals().items() if name != "dry_run"}
    check(target)
    from accelerate import PartialState

    from specdec.training.evaluate import HeldOut
    from specdec.training.recipe import Recipe
    from specdec.training.run import train as train_head

    recipe = Recipe(**options)
    if dry_run:
        from specdec.training.plan import plan

        typer.echo(plan(recipe).summary())
        return
    try:
        found = train_head(recipe)
    except KeyboardInterrupt:
        raise interrupted("stopped: the same command goes on from the last checkpoint") from None
    if not PartialState().is_main_process:
        return
    if found is None:
        typer.echo("not finished yet: the same command goes on")
        return
    if isinstance(found, HeldOut):
        typer.echo(f"held-out texts: loss {found.loss:.3f}, simulated length {found.simulated_length:.2f}; not decoded")
    else:
        _say(found, recipe.drafted)
    name = kind if kind in ("eagle3", "mtp") else "dflash"
    typer.echo(f"the head is in {out / 'head'}: SpeculativeGenerator(model, '{name}:{out / 'head'}')")


def _say(found: Evaluation, drafted: int) -> None:
    typer.echo(
        f"mean acceptance length on held-out prompts: {found.tree_length:.2f} with trees at T=0, "
        f"{found.tree_length_sampled:.2f} at T=1; chains of {drafted}: "
        f"{found.mean_acceptance_length:.2f}, simulated {found.simulated_length:.2f}"
    )
    if found.warning:
        typer.secho(f"warning: {found.warning}", fg="yellow", err=True)
