"""PyPI's package `specdec` is another project's, with our import name: what to say where it was installed over ours.

Owns the names. Knows nothing of what is imported afterwards.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

OURS, THEIRS = "specdec-hf", "specdec"  # as distributions


def refuse_namesake(package: Path = Path(__file__).parents[1]) -> None:
    """Raise ImportError where files of the other project were put into the folder of this package."""
    try:
        theirs = distribution(THEIRS)
    except PackageNotFoundError:
        return
    inside = [theirs.locate_file(file) for file in theirs.files or () if file.suffix == ".py"]
    if any(Path(str(file)).resolve().parent == package.resolve() for file in inside):
        raise ImportError(
            f'PyPI\'s package "{THEIRS}" {theirs.version} is another project and lies in the same folder as this one, '
            f"{package}: run `pip uninstall {THEIRS}`, then install {OURS} anew with `pip install --force-reinstall "
            "--no-deps`"
        )
