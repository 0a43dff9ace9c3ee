"""`Commands`: the group of all commands, and how one ends that cannot do what it was asked for.

Bad input ends with one sentence: a ValueError, OSError or ImportError that somebody raised to say so. Any other error
is called unexpected, for it may be a fault of specdec's, and has an exit code of its own. `--debug` adds the traceback.
"""

from __future__ import annotations

import dis
import traceback
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

BAD_INPUT, UNEXPECTED = 2, 70  # exit codes: 2 is also that of a wrong option, 70 is EX_SOFTWARE of sysexits.h
PACKAGE = Path(__file__).parents[1]


class Commands(TyperGroup):
    """The commands, with one place where all of their errors are reported."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            if hasattr(error, "exit_code") or isinstance(error, (typer.Abort, BrokenPipeError)):
                raise  # typer's own errors; and a closed standard output, at which typer ends without a word
            if ctx.params.get("debug"):
                traceback.print_exception(error)
            if is_bad_input(error):
                typer.secho(f"error: {error}", fg="red", err=True)
                raise typer.Exit(BAD_INPUT) from error
            again = f"`specdec --debug {ctx.invoked_subcommand} ...`, or SPECDEC_DEBUG=1, shows where it came from"
            typer.secho(f"unexpected error, {type(error).__name__}: {error} ({again})", fg="red", err=True)
            raise typer.Exit(UNEXPECTED) from error


def is_bad_input(error: Exception) -> bool:
    """Whether an error says what is wrong with the input, in words that somebody wrote for it.

    A ValueError that Python itself raised in a line of specdec's (`int("x")`, a tuple of another length) is nobody's
    words: that case was not thought of.
    """
    if not isinstance(error, (ValueError, OSError, ImportError)):
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not isinstance(error, ValueError):
        return True
    code = trace.tb_frame.f_code
    ours = Path(code.co_filename).is_relative_to(PACKAGE)
    return not ours or code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]
