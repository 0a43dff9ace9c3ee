"""`specdec heads`, `inspect` and `export`: list the known draft heads, show one, and convert EAGLE-3 heads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from specdec.cli.common import load, print_message
from specdec.utils.choices import HeadLayout
from specdec.utils.paths import check_writable, lasting_files, located, require_folder_or_id

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from specdec.heads.eagle3.head import Eagle3Head

PROBE_PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number, and explain how it works.",
    "Explain in a few sentences why the sky is blue and sunsets are red.",
    "List five things to check before a long bicycle trip, each with a short reason.",
)
PROBE_TOKENS = 48
NGRAMS = '"ngram", which needs no model'
CLEARLY = 1.1  # ratio of accepted tokens from which two conventions count as different
SELDOM = 0.1  # accepted tokens per draft that any trained head of this model exceeds


def heads(
    target: str = typer.Argument("", help="Path or hub id of a model: list only its heads.", callback=located),
) -> None:
    """List the draft heads that are known for models, where they come from, and which are on this machine.

    "auto" uses the first one of a model.
    """
    if target:
        require_folder_or_id(target)
    from specdec.heads import registry
    from specdec.heads.small_models import advice

    known = registry.known_for(target) if target else registry.HEADS
    if not known:
        typer.echo(f"no head is known for {target}. What drafts for it: {advice(registry.named(target))}, or {NGRAMS}")
        return
    rows = [("target", "kind", "layout", "source", "on this machine")]
    for entry in known:
        folder = registry.where(entry)
        rows.append((entry.target, entry.kind, entry.layout, entry.head, "no" if folder is None else str(folder)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print_message('"auto" drafts with the first head of a model. Another one: "KIND:SOURCE", as in "dflash:HUB_ID".')


def inspect(
    head: str = typer.Argument(help="Folder or hub id of an EAGLE head, or of a DFlash drafter or its kin."),
    target: str | None = typer.Option(None, help="Path or hub id of its target, to check that they are compatible."),
    probe: bool = typer.Option(False, help="Measure which numbering of the target's layers the head uses."),
) -> None:
    """Show the contents of an EAGLE head or a block-parallel drafter, the parts in use, and the assumptions made."""
    if probe and target is None:
        raise typer.BadParameter("--probe needs --target", param_hint="--probe")
    for name in filter(None, (head, target)):
        require_folder_or_id(name)
    from specdec.heads.eagle3.head import Eagle3Head
    from specdec.heads.hydra.head import HydraHeads
    from specdec.heads.loading import read
    from specdec.proposers.draft_heads.block import BlockProposer
    from specdec.proposers.draft_heads.eagle3 import Eagle3Proposer
    from specdec.proposers.draft_heads.hydra import HydraProposer

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
        typer.echo(_probe_taps(proposer.head, model, tokenizer))


def _probe_taps(head: Eagle3Head, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    """Measure the mean acceptance length with each tap convention, and say which one is clearly ahead."""
    from specdec.data.prompts import Prompt
    from specdec.engine.generator import SpeculativeGenerator
    from specdec.engine.settings import MEASURED
    from specdec.models.introspection import device_of
    from specdec.proposers.draft_heads.eagle3 import Eagle3Proposer

    if head.config.version == 1 or head.config.tap_ids is None:
        return "nothing to probe: the head's config names no layers (`tap_ids`)"
    before, lengths = head.config, {}
    for convention in ("entering", "output"):
        head.config = replace(before, tap_convention=convention, tap_convention_known=True)
        try:
            spec = SpeculativeGenerator(target, Eagle3Proposer(head), draft_length=4, on_unsupported="error")
        except ValueError:  # no such layers under this convention
            continue
        for prompt in PROBE_PROMPTS:
            inputs = Prompt("", prompt).encode(tokenizer, device_of(target))
            spec.generate(**inputs, **MEASURED, max_new_tokens=PROBE_TOKENS, do_sample=False)
        lengths[convention] = spec.report.mean_acceptance_length
    if not lengths:
        raise ValueError(
            "the head names layers that this target does not have, under any tap convention: choose the head's own "
            "target"
        )
    (best, longest), *others = sorted(lengths.items(), key=lambda item: -item[1])
    measured = ", ".join(f"{convention} {length:.2f}" for convention, length in lengths.items())
    if longest < 1 + SELDOM:
        found = "Hardly any draft is accepted: this head belongs to another model, or was not trained."
    elif others and longest - 1 <= CLEARLY * (others[0][1] - 1):
        few = f"{len(PROBE_PROMPTS)} texts of {PROBE_TOKENS} tokens"
        found = f"Too close to decide over {few}: the convention given above is kept."
    else:
        found = f"{best!r} is right."
    return f"mean acceptance length by tap convention: {measured}. {found}"


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
    check_writable(out, folder=True)
    if not force and Path(out).is_dir() and lasting_files(out):
        raise ValueError(f"{out} is not empty: choose another folder, or overwrite the head in it with --force")
    from specdec.heads.eagle3.checkpoint import load
    from specdec.heads.eagle3.export import lost_in, save, widen

    loaded = load(head)
    save(loaded if layout == "int8" else widen(loaded), out, layout, target)
    for lost in lost_in(loaded.config, layout):
        print_message(lost, "warning")
    if layout == "speculators" and not target:
        print_message("vLLM reads the target from this layout's config: give --target", "warning")
    size = (Path(out) / "model.safetensors").stat().st_size
    typer.echo(f"{out}: {size / 1e6:.1f} MB in the layout {layout}")
