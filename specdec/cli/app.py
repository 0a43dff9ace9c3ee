"""The command line. Each command is a thin layer over the library, in a file of its own."""

from __future__ import annotations

import re
from collections.abc import Callable
from inspect import getdoc

import typer

from specdec.cli import bench, chat, data, doctor, generate, heads, serve, states, training
from specdec.cli.common import print_versions, show_messages
from specdec.cli.errors import Commands


def unwrapped(command: Callable[..., None]) -> str:
    """Return a command's docstring, each paragraph on one line: help is wrapped to the width of the terminal."""
    return re.sub(r"(?<!\n)\n(?!\n)", " ", getdoc(command) or "")


app = typer.Typer(cls=Commands, help="Speculative decoding for Hugging Face models.", no_args_is_help=True)
for command in (
    generate.generate,
    chat.chat,
    serve.serve,
    bench.bench,
    doctor.doctor,
    heads.heads,
    heads.inspect,
    heads.export,
    data.regenerate,
    training.train,
    states.serve_states,
):
    app.command(help=unwrapped(command))(command)


@app.callback(invoke_without_command=True)
def main(
    version: bool = typer.Option(
        False, "--version", help="Print the versions of specdec, transformers and torch.", is_eager=True
    ),
    debug: bool = typer.Option(
        False, "--debug", envvar="SPECDEC_DEBUG", help="Print the traceback of an error before its message."
    ),
) -> None:
    """Speculative decoding for Hugging Face models."""
    if version:
        print_versions()
        raise typer.Exit
    show_messages()
