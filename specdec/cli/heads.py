"""`specdec inspect` and `specdec export`: show the contents of a draft head, and convert EAGLE-3 heads."""

from __future__ import annotations

from pathlib import Path

import typer

from specdec.cli.common import load
from specdec.utils.choices import HeadLayout
from specdec.utils.paths import require_folder_or_id


def inspect(
    head: str = typer.Argument(help="Folder or hub id of an EAGLE head, or of a DFlash or DSpark drafter."),
    target: str | None = typer.Option(None, help="Path or hub id of its target, to check that they are compatible."),
    probe: bool = typer.Option(False, help="Measure which numbering of the target's layers the head uses."),
) -> None:
    """Show the contents of an EAGLE head or a block-parallel drafter, the parts in use, and the assumptions made."""
    if probe and target is None:
        raise typer.BadParameter("--probe needs --target", param_hint="--probe")
    for name in (head, *([target] if target else [])):
        require_folder_or_id(name)
    from specdec.heads.eagle3.head import Eagle3Head
    from specdec.heads.hydra.head import HydraHeads
    from specdec.heads.loading import read
    from specdec.proposers.draft_heads.block import BlockProposer
    from specdec.proposers.draft_heads.eagle3 import Eagle3Proposer
    from specdec.proposers.draft_heads.hydra import HydraProposer
    from specdec.training.tap_probe import probe_taps

    checkpoint = read(head)
    typer.echo(checkpoint.summary())
    module = checkpoint.head()
    if target is None:
        return
    model, tokenizer = load(target, tokenizer=probe)
    module = module.to(model.device)
    proposer: Eagle3Proposer | BlockProposer | HydraProposer
    if isinstance(module, Eagle3Head) and module.config.mask_token_id is None:
        proposer = Eagle3Proposer(module)
    elif isinstance(module, HydraHeads):
        proposer = HydraProposer(module)
    else:
        proposer = BlockProposer(module)
    proposer.check(model)
    typer.echo(f"\nIt is compatible with {target}, and reads the states entering its layers {proposer.taps(model).at}.")
    if probe:
        if not isinstance(proposer, Eagle3Proposer):
            raise ValueError(
                "leave out --probe: only EAGLE heads need it, a block-parallel drafter's layout defines its numbering"
            )
        typer.echo(probe_taps(proposer.head, model, tokenizer))


def export(
    head: str = typer.Argument(help="Folder or hub id of an EAGLE-3 head, in any known layout."),
    out: str = typer.Argument(help="Folder to write."),
    layout: HeadLayout = typer.Option(
        "sglang",
        help='Layout: "sglang" (SafeAILab, SpecForge, SGLang), "speculators" (vLLM) or "int8" (half the size, ours).',
    ),
    target: str = typer.Option("", help="Hub id of the target, which vLLM's layout records."),
    force: bool = typer.Option(False, "--force", help="Overwrite a head in OUT."),
) -> None:
    """Write an EAGLE-3 head in another layout."""
    require_folder_or_id(head)
    if Path(out).resolve() == Path(head).resolve():
        raise ValueError(f"{out} is the folder of the head itself, which would be overwritten: choose another folder")
    if not force and Path(out).is_dir() and any(Path(out).iterdir()):
        raise ValueError(f"{out} is not empty: choose another folder, or overwrite the head in it with --force")
    from specdec.heads.eagle3.checkpoint import load
    from specdec.heads.eagle3.export import lost_in, save
    from specdec.heads.eagle3.widen import widened

    loaded = load(head)
    save(loaded if layout == "int8" else widened(loaded), out, layout, target)
    for lost in lost_in(loaded.config, layout):
        typer.secho(f"warning: {lost}", fg="yellow", err=True)
    if layout == "speculators" and not target:
        typer.secho("warning: vLLM reads the target from this layout's config: give --target", fg="yellow", err=True)
    size = (Path(out) / "model.safetensors").stat().st_size
    typer.echo(f"{out}: {size / 1e6:.1f} MB in the layout {layout}")
