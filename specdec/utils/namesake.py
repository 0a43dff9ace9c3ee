"""Detect PyPI's unrelated package `specdec`, which has the same import name, where it was installed over this one."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

OURS, THEIRS = "specdec-hf", "specdec"  # distribution names


def refuse_namesake(package: Path = Path(__file__).parents[1]) -> None:
    """Raise ImportError if the other project's files were installed into the folder of this package."""
    try:
        theirs = distribution(THEIRS)
    except PackageNotFoundError:
        return
    inside = [theirs.locate_file(file) for file in theirs.files or () if file.suffix == ".py"]
    if any(Path(str(file)).resolve().parent == package.resolve() for file in inside):
        raise ImportError(
            f'PyPI\'s package "{THEIRS}" {theirs.version} is another project and was installed into the folder of this '
            f"one, {package}: run `pip uninstall {THEIRS}`, then reinstall {OURS} with `pip install --force-reinstall "
            "--no-deps`"
        )
