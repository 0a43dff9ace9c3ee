"""`Commands`: the group of all commands, which reports their errors.

Bad input, i.e. a ValueError, OSError or ImportError raised on purpose, ends with one sentence. Any other error may be
a bug in specdec: it is reported as unexpected, with another exit code. `--debug` adds the traceback.
"""

from __future__ import annotations

import dis
import traceback
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from specdec.cli.common import print_message

BAD_INPUT, UNEXPECTED = 2, 70  # exit codes: 2 as for a wrong option, 70 as EX_SOFTWARE in sysexits.h
PACKAGE = Path(__file__).parents[1]


class Commands(TyperGroup):
    """A group of commands that reports all errors in one place."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            if hasattr(error, "exit_code") or isinstance(error, (typer.Abort, BrokenPipeError)):
                raise  # typer's own errors, and a closed standard output, for which typer exits silently
            if ctx.params.get("debug"):
                traceback.print_exception(error)
            if is_bad_input(error):
                print_message(error, "error")
                raise typer.Exit(BAD_INPUT) from error
            again = f"`specdec --debug {ctx.invoked_subcommand} ...`, or SPECDEC_DEBUG=1, shows the traceback"
            print_message(f"{error} ({again})", f"unexpected error, {type(error).__name__}")
            raise typer.Exit(UNEXPECTED) from error


def is_bad_input(error: Exception) -> bool:
    """Return whether an error was raised on purpose to describe invalid input.

    False for a ValueError that Python itself raised in a line of specdec (`int("x")`, unpacking a tuple of another
    length), since that is an unhandled case.
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
