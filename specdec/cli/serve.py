"""`specdec serve`: an OpenAI-compatible server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from specdec.cli import options
from specdec.cli.common import check, interrupted, print_message
from specdec.utils.choices import COUPLED

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specdec.engine.generator import SpeculativeGenerator


def serve(
    target: options.Target,
    proposer: options.Proposer = "auto",
    model_name: str | None = typer.Option(None, help="Name of the model in requests. Default: the path or hub id."),
    host: str = typer.Option("localhost", help="Address to listen on. Anyone who can reach it can use the model."),
    port: int = typer.Option(8000, min=1, max=65535, help="Port to listen on."),
    seed: int | None = typer.Option(
        None, min=-(2**63), max=2**64 - 1, help="Seed of requests that name none. Default: random."
    ),
    max_queue: int = typer.Option(64, min=1, help="Maximum number of waiting requests; further ones get status 429."),
    max_length: int | None = typer.Option(
        None, min=2, help="Maximum tokens of a prompt with its answer. Default: the model's limit."
    ),
    draft_length: options.DraftLength = None,
    rule: options.Rule = COUPLED,
    exact: options.Exact = False,
    dtype: options.Format = "auto",
    device: options.Device = None,
) -> None:
    """Serve a model over an OpenAI-compatible API. Ctrl-C stops it and prints a report.

    One request is answered at a time; clients take turns.
    """
    made: list[SpeculativeGenerator] = []

    def generator_of(model: PreTrainedModel) -> SpeculativeGenerator:
        from specdec.engine.generator import SpeculativeGenerator

        made.append(SpeculativeGenerator(model, proposer, draft_length=draft_length, rule=rule, exact=exact))
        return made[-1]

    def farewell() -> None:
        for spec in made:
            typer.echo(f"\n{spec.report}")

    try:
        check(target, proposer)
        from specdec.cli.server import prepared

        server = prepared(
            target,
            generator_of,
            name=model_name,
            host=host,
            port=port,
            default_seed=seed,
            dtype=dtype,
            device=device,
            max_queue=max_queue,
            max_length=max_length,
        )
        print_message(f"http://{host}:{port}/v1, model {model_name or target!r}, proposer {proposer}")
        number = server.run(farewell)
    except KeyboardInterrupt:
        raise interrupted() from None
    raise typer.Exit(128 + number)  # as shells report a signal
