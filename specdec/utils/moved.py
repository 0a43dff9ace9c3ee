"""Old import paths of public names. They work for one release, with a `DeprecationWarning` that names the new path."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MOVED = {  # old module -> name -> new module
    "specdec.bench": {"bench": "specdec.evaluation.bench", "Bench": "specdec.evaluation.bench"},
    "specdec.blocks": {
        "DFlashConfig": "specdec.heads.dflash.config",
        "DFlashHead": "specdec.heads.dflash.head",
        "load": "specdec.heads.loading",
    },
    "specdec.chat": {"Chat": "specdec.cli.chat_session"},
    "specdec.diagnosis": {"Diagnosis": "specdec.evaluation.diagnosis"},
    "specdec.doctor": {"diagnose": "specdec.evaluation.doctor"},
    "specdec.eagle3": {
        "Eagle3Config": "specdec.heads.eagle3.config",
        "Eagle3Head": "specdec.heads.eagle3.head",
        "load": "specdec.heads.eagle3.checkpoint",
        "save": "specdec.heads.eagle3.export",
    },
    "specdec.hub": {"generate": "specdec.engine.hub", "generator": "specdec.engine.hub"},
    "specdec.plots": dict.fromkeys(
        ("acceptance_per_position", "round_tree", "speed_ups", "time_per_part"), "specdec.evaluation.plots"
    ),
    "specdec.proposers": {
        "BlockProposer": "specdec",
        "Context": "specdec",
        "DraftModelProposer": "specdec",
        "Eagle3Proposer": "specdec",
        "EarlyExitProposer": "specdec",
        "HybridProposer": "specdec",
        "HydraProposer": "specdec",
        "Lookup": "specdec.proposers.lookup.base",
        "MtpProposer": "specdec",
        "NgramProposer": "specdec",
        "Proposer": "specdec",
        "SuffixProposer": "specdec",
        "TextMemory": "specdec",
        "TranslatedDraftProposer": "specdec",
    },
    "specdec.proposers.named": {"as_proposers": "specdec.proposers.factory"},
    "specdec.serving": {"serve": "specdec.cli.server"},
    "specdec.streamer": {"ColourStreamer": "specdec.cli.streamer"},
    "specdec.training": {
        "HeadTrainer": "specdec.training.trainer",
        "LocalTeacher": "specdec.training.teacher.base",
        "Recipe": "specdec.training.recipe",
        "initialize": "specdec.training.initialization.eagle3",
        "train": "specdec.training.run",
    },
}


def moved_names(module: str) -> Callable[[str], Any]:
    """The `__getattr__` of an old module, which imports each name from its new module.

    Raises:
        AttributeError: raised by the returned function for a name that the old module did not have.

    Examples:
        >>> moved_names("specdec.plots")("speed_ups").__module__
        'specdec.evaluation.plots'
    """

    def get(name: str) -> Any:
        if name not in MOVED[module]:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        new = MOVED[module][name]
        warnings.warn(f"{module}.{name} is now {new}.{name}", DeprecationWarning, stacklevel=2)
        return getattr(import_module(new), name)

    return get


def renamed_method(old: str, new: str) -> Callable[..., Any]:
    """A method under its old name, which warns and calls the new one.

    Args:
        old: class and old method name, for the warning.
        new: name of the method to call.

    Examples:
        >>> class Loop:
        ...     def run(self):
        ...         return "done"
        ...     go = renamed_method("Loop.go", "run")  # DeprecationWarning: Loop.go is now run
        >>> Loop().go()
        'done'
    """

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        warnings.warn(f"{old} is now {new}", DeprecationWarning, stacklevel=2)
        return getattr(self, new)(*args, **kwargs)

    return method


class OldModules(MetaPathFinder, Loader):
    """Import finder and loader for the modules of `MOVED` that no longer have a file."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in MOVED else None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = moved_names(module.__name__)  # type: ignore[method-assign]


def find_old_modules() -> None:
    """Make imports from old paths work, `from specdec.eagle3 import load` for example.

    Examples:
        >>> find_old_modules()
        >>> import specdec.eagle3
    """
    if not any(isinstance(finder, OldModules) for finder in sys.meta_path):
        sys.meta_path.append(OldModules())
