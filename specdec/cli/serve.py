"""`specdec serve`: an OpenAI-compatible server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from specdec.cli import options
from specdec.cli.common import INTERRUPTED, check, print_message
from specdec.utils.choices import COUPLED, NumberFormat

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specdec.engine.generator import SpeculativeGenerator


def serve(
    target: options.Target,
    proposer: options.Proposer = "auto",
    host: str = typer.Option("localhost", help="Address to listen on."),
    port: int = typer.Option(8000, min=1, max=65535, help="Port to listen on."),
    seed: options.Seed = None,
    draft_length: options.DraftLength = None,
    rule: options.Rule = COUPLED,
    dtype: NumberFormat = typer.Option("auto", help="Number format; auto: as saved."),
    device: str = typer.Option("auto", help='Device: "cpu", "cuda", ... Default: the best one available.'),
) -> None:
    """Serve a model over an OpenAI-compatible API: the server of transformers, with specdec. Ctrl-C stops it."""
    made: list[SpeculativeGenerator] = []

    def generator_of(model: PreTrainedModel) -> SpeculativeGenerator:
        from specdec.engine.generator import SpeculativeGenerator

        made.append(SpeculativeGenerator(model, proposer, draft_length=draft_length, rule=rule))
        return made[-1]

    try:
        check(target, proposer)
        from specdec.cli.server import serve as serve_model

        print_message(f"http://{host}:{port}/v1, model {target!r}, proposer {proposer}")
        serve_model(target, generator_of, host=host, port=port, default_seed=seed, dtype=dtype, device=device)
    except KeyboardInterrupt:  # the server has released everything by now
        raise typer.Exit(INTERRUPTED) from None
    finally:
        for spec in made:
            typer.echo(f"\n{spec.report}")
