"""Releases of transformers and torch that specdec is tested with, and advice about others. Imports neither."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

# (oldest, newest) that CI runs the tests with: constraints-oldest.txt and constraints-newest.txt.
TESTED = {"transformers": ("5.17", "5.24"), "torch": ("2.9", "2.15")}


def installed(package: str) -> str:
    """Version of an installed package; empty if it is not installed.

    Examples:
        >>> installed("no-such-package")
        ''
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def release(number: str) -> tuple[int, ...]:
    """Major and minor number of a version.

    Examples:
        >>> release("5.24.0.dev0")
        (5, 24)
    """
    return tuple(int(part) for part in re.findall(r"\d+", number)[:2])


def is_newer(package: str) -> bool:
    """Return whether the installed release is newer than the newest tested one."""
    return release(installed(package)) > release(TESTED[package][1])


def is_tested(package: str) -> bool:
    """Return whether the installed release lies in the tested range.

    Examples:
        >>> is_tested("torch") and is_newer("torch")
        False
    """
    oldest, newest = TESTED[package]
    return release(oldest) <= release(installed(package)) <= release(newest)


def advice(package: str = "transformers") -> str:
    """One sentence on how the installed release relates to the tested ones, and what to install.

    Examples:
        >>> advice("torch")  # doctest: +SKIP
        'torch 2.16.0 is newer than the releases that this specdec was tested with (2.9 to 2.15): upgrade ...'
    """
    oldest, newest = TESTED[package]
    have, span = f"{package} {installed(package)}", f"{oldest} to {newest}"
    tested = f'`pip install "{package}=={newest}.*"`'
    if is_newer(package):
        return (
            f"{have} is newer than the releases that this specdec was tested with ({span}): upgrade specdec with "
            f"`pip install --upgrade specdec-hf`, or install a tested release with {tested}"
        )
    if not is_tested(package):
        return f"{have} is older than the releases that this specdec was tested with ({span}): upgrade with {tested}"
    return f"{have} is a release that specdec was tested with ({span}): reinstall it with {tested}, or report this"


def note_release(error: Exception) -> None:
    """Add a note to an error if a release newer than the tested ones may have caused it (Python 3.11 and later)."""
    if hasattr(error, "add_note"):
        for package in filter(is_newer, TESTED):
            error.add_note(advice(package))


def summary() -> str:
    """The installed releases and the tested ranges, on one line.

    Examples:
        >>> summary()  # doctest: +ELLIPSIS
        'transformers ... (tested: 5.17 to 5.24), torch ... (tested: 2.9 to 2.15)'
    """
    parts = [f"{name} {installed(name) or 'missing'} (tested: {a} to {b})" for name, (a, b) in TESTED.items()]
    return ", ".join(parts)
