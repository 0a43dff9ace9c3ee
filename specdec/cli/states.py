"""`specdec serve-states`: serves a target's hidden states for training on other machines."""

from __future__ import annotations

from socket import create_server
from typing import Literal

import typer

from specdec.cli import options
from specdec.cli.common import check, interrupted, load, print_message


def serve_states(
    target: options.Target,
    host: str = typer.Option("localhost", help="Address to listen on. Anyone who can reach it can use the target."),
    port: int = typer.Option(8100, min=0, max=65535, help="Port to listen on."),
    shard: Literal["none", "devices"] = typer.Option(
        "none", help='"devices": split the target over all devices of this machine (device_map).'
    ),
    device: options.Device = None,
) -> None:
    """Serve a target's hidden states to `specdec train --teacher http://HOST:PORT`. Ctrl-C stops it."""
    check(target, tokenizer=False)
    create_server((host, port)).close()  # fail on a port in use before loading the target
    from specdec.models.introspection import require_decoder_only
    from specdec.models.loading import load as load_model
    from specdec.training.precision import in_fastest_dtype
    from specdec.training.teacher.state_server import StatesServer

    if shard == "devices":
        model = load_model(target, device_map="auto")
    else:
        model = in_fastest_dtype(load(target, tokenizer=False, device=device)[0])
    require_decoder_only(model.config, target)
    server = StatesServer(model, (host, port))
    print_message(f"http://{host}:{server.server_port}, target {target!r}: {server.description['fingerprint']}")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        raise interrupted() from None
    finally:
        server.server_close()
