"""Old import paths of public names. They work for one release, with a `DeprecationWarning` that names the new path."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T", bound=Callable[..., Any])

RENAMED = {"Round": "RoundTrace", "Verdict": "RoundResult"}  # old name in `specdec` -> new name there
MOVED = {  # old module -> name -> new module
    "specdec.bench": {"bench": "specdec.evaluation.bench", "Bench": "specdec.evaluation.bench"},
    "specdec.blocks": {
        "DFlashConfig": "specdec.heads.dflash.config",
        "DFlashHead": "specdec.heads.dflash.head",
        "load": "specdec.heads.loading",
    },
    "specdec.chat": {"Chat": "specdec"},
    "specdec.cli.chat_session": {"Chat": "specdec"},
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


def warn_of_old_name(old: str, new: str) -> None:
    """Warn that a name is now another, at the line that used the old one. Called by the function that was used.

    `from package import name` looks the name up twice: the import system calls `hasattr` first. Only the second one
    warns.

    Examples:
        >>> def total():
        ...     warn_of_old_name("total", "sum")
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     total()
        >>> str(caught[0].message)
        'total is now sum'
    """
    frame, level = sys._getframe(2), 3  # the caller of the function that called this one
    if frame.f_code.co_name == "_handle_fromlist" and frame.f_globals.get("__name__") == "importlib._bootstrap":
        return
    while frame.f_globals.get("__name__") == "dataclasses" and frame.f_back is not None:  # `dataclasses.replace`
        frame, level = frame.f_back, level + 1
    warnings.warn(f"{old} is now {new}", DeprecationWarning, stacklevel=level)


def moved_names(module: str) -> tuple[list[str], Callable[[], list[str]], Callable[[str], Any]]:
    """The `__all__`, `__dir__` and `__getattr__` of an old module. Each name is imported from its new module.

    Raises:
        AttributeError: raised by `__getattr__` for a name that the old module did not have.

    Examples:
        >>> names, _, get = moved_names("specdec.hub")
        >>> names, get("generator").__module__
        (['generate', 'generator'], 'specdec.engine.hub')
    """

    def names() -> list[str]:
        return sorted({*vars(sys.modules[module]), *MOVED[module]})

    def get(name: str) -> Any:
        if name not in MOVED[module]:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        new = MOVED[module][name]
        warn_of_old_name(f"{module}.{name}", f"{new}.{name}")
        return getattr(import_module(new), name)

    return sorted(MOVED[module]), names, get


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
        warn_of_old_name(old, new)
        return getattr(self, new)(*args, **kwargs)

    return method


def renamed_argument(old: str, new: str) -> Callable[[T], T]:
    """A decorator for a function or class that accepts a keyword argument under its old name, with a warning.

    Examples:
        >>> @renamed_argument("room", "budget")  # DeprecationWarning: draft(room=...) is now draft(budget=...)
        ... def draft(budget):
        ...     return budget
        >>> draft(room=3)
        3
    """

    def decorate(decorated: T) -> T:
        name = decorated.__qualname__
        function: Any = decorated.__init__ if isinstance(decorated, type) else decorated  # type: ignore[misc]

        @wraps(function)
        def with_new_name(*args: Any, **kwargs: Any) -> Any:
            if old in kwargs:
                warn_of_old_name(f"{name}({old}=...)", f"{name}({new}=...)")
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        if not isinstance(decorated, type):
            return with_new_name  # type: ignore[return-value]
        decorated.__init__ = with_new_name  # type: ignore[misc]
        return decorated

    return decorate


class OldModules(MetaPathFinder, Loader):
    """Import finder and loader for the modules of `MOVED` that no longer have a file."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in MOVED else None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        names = ("__all__", "__dir__", "__getattr__")
        vars(module).update(zip(names, moved_names(module.__name__), strict=True))


def find_old_modules() -> None:
    """Make imports from old paths work, `from specdec.eagle3 import load` for example.

    Examples:
        >>> find_old_modules()
        >>> import specdec.eagle3
    """
    if not any(isinstance(finder, OldModules) for finder in sys.meta_path):
        sys.meta_path.append(OldModules())
