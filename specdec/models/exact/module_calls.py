"""`ModuleCalls`: what the modules of a model take and give in a pass, and where two passes part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class ModuleCalls:
    """First tensor that each module took and gave, by its name; names of modules that used the cache."""

    taken: dict[str, Tensor] = field(default_factory=dict)
    given: dict[str, Tensor] = field(default_factory=dict)
    cached: set[str] = field(default_factory=set)


@contextmanager
def listening(calls: list[ModuleCalls]) -> Iterator[ModuleCalls]:
    """Record the calls of a pass that runs within this context."""
    calls.append(ModuleCalls())
    try:
        yield calls[-1]
    finally:
        calls.pop()


def keep(
    calls: list[ModuleCalls], name: str, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any
) -> None:
    """Record a module's call, as a forward hook; nothing while nobody is `listening`."""
    if not calls:
        return
    taken = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
    given = output if isinstance(output, Tensor) else _first_tensor(output)
    if taken is not None and given is not None:
        calls[-1].taken[name], calls[-1].given[name] = taken, given
    # None and lengths of the cache are no cache.
    if any("past" in each or "cache" in each for each in kwargs if not isinstance(kwargs[each], (int, type(None)))):
        calls[-1].cached.add(name)


def _first_tensor(output: Any) -> Tensor | None:
    values = output.values() if isinstance(output, dict) else output if isinstance(output, (tuple, list)) else ()
    return next((value for value in values if isinstance(value, Tensor)), None)


def culprits(plain: list[ModuleCalls], ours: ModuleCalls) -> set[str]:
    """Modules whose inputs agree for every node and whose outputs do not, without those that only contain such ones.

    If some output differs and no such module is found, the module with the differing output itself.
    """

    def agrees(name: str, which: str) -> bool:
        mine = getattr(ours, which)[name]
        return all(_same(mine, getattr(calls, which).get(name), i, len(plain)) for i, calls in enumerate(plain))

    names = [name for name in ours.given if name in plain[0].given]
    wrong = {name for name in names if not agrees(name, "given")}
    culprits = {name for name in wrong if agrees(name, "taken")}
    return {name for name in culprits if not any(other != name and within(other, name) for other in culprits)} or (
        {""} if wrong else set()
    )


def within(name: str, other: str) -> bool:
    """Return whether a module's name is that of a part of the other module; "" is the whole model."""
    return not other or name.startswith(other + ".")


def _same(ours: Tensor, plain: Tensor | None, node: int, nodes: int) -> bool:
    """Return whether a node's part of a tensor has the bits of a pass over it alone; True if not comparable."""
    if plain is None:
        return True
    if ours.dim() > 1 and ours.shape[1] == nodes and plain.shape[1:2] == (1,):
        mine, theirs = ours[:, node], plain[:, 0]
    elif ours.shape[:1] == (nodes,) and plain.shape[:1] == (1,):
        mine, theirs = ours[node], plain[0]
    else:
        return True
    return mine.shape != theirs.shape or torch.equal(mine, theirs)


def runnable_alone(name: str, ours: ModuleCalls, alone: set[str]) -> str | None:
    """The module itself or the nearest around it that takes and gives (1, n, ...) and uses no cache."""
    while name and (name in alone or name in ours.cached or not _by_node(ours, name)):
        if name in ours.cached:
            return None
        name = name.rpartition(".")[0]
    return name or None


def _by_node(ours: ModuleCalls, name: str) -> bool:
    if name not in ours.taken:
        return False
    taken, given = ours.taken[name], ours.given[name]
    return taken.dim() == given.dim() == 3 and taken.shape[1] == given.shape[1]
