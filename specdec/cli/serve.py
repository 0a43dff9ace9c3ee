"""`specdec serve`: an OpenAI-compatible server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from specdec.cli.common import DRAFT_LENGTH, SEED, WHAT_DRAFTS, bad_input_ends, drafting
from specdec.proposers.named import check_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specdec import SpeculativeGenerator


def serve(
    target: str = typer.Argument(help="Path or hub id of the target model."),
    proposer: str = typer.Option("auto", help=WHAT_DRAFTS),
    host: str = typer.Option("localhost", help="Address to listen at."),
    port: int = typer.Option(8000, help="Port to listen at."),
    seed: int | None = typer.Option(None, help=SEED),
    draft_length: int | None = typer.Option(None, min=0, help=DRAFT_LENGTH),
    dtype: str = typer.Option("auto", help="auto (as saved), bfloat16, float16 or float32."),
    device: str = typer.Option("auto", help='"cpu", "cuda", ...: the best there is by default.'),
) -> None:
    """Serve a model by OpenAI's protocol: transformers' own server, with specdec inside. Ctrl-C ends it."""
    from specdec import SpeculativeGenerator
    from specdec.serving import serve as serve_model

    made: list[SpeculativeGenerator] = []

    def generator_of(model: PreTrainedModel) -> SpeculativeGenerator:
        made.append(SpeculativeGenerator(model, drafting(proposer, model), draft_length=draft_length))
        return made[-1]

    with bad_input_ends():
        check_name(proposer)
        serve_model(target, generator_of, host=host, port=port, default_seed=seed, dtype=dtype, device=device)
    for spec in made:
        typer.echo(f"\n{spec.report}")
