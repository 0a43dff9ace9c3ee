"""`exactness`: finds out whether draft nodes get the bits of plain decoding, and in which modules they do not.

A pass over a small draft tree through the exact view is compared, bit by bit, with the model's own passes over one
token each. Every module's output is compared: a module whose inputs agree and whose outputs differ is run for each node
alone, if it can be. What still differs is reported.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.models.capability import Capability, settings_of, short_windows
from specdec.models.encoder import stand_in
from specdec.models.introspection import cache_argument, is_sharded
from specdec.models.probe import run_plainly, token_ids
from specdec.models.runner import ModelRunner
from specdec.models.views import apart, in_eval_mode
from specdec.sampling.draft_tree import DraftTree

log = logging.getLogger(__name__)

PROMPT = 9  # tokens
PARENTS = (-1, 0, 1, 2, 1, 0)  # of the nodes of the probe's tree
CHAIN = (-1, 0, 1, 2)  # for a model that can run nothing else
REPAIRS = 4  # attempts to run more modules for each node alone
TRIES = 3  # timed passes; the fastest counts


@dataclass(frozen=True)
class Exactness:
    """Result of the probe.

    Attributes:
        inexact: names of the modules whose outputs differ from plain decoding's although their inputs agree; empty if
            all bits agree.
        alone: names of the modules that have to run each node alone.
        cost: time of an exact pass over a small draft, relative to the usual pass over it.
    """

    inexact: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    cost: float = 1.0

    @property
    def exact(self) -> bool:
        """True if draft nodes get plain decoding's bits."""
        return not self.inexact

    def problem(self, batch_size: int) -> str | None:
        """Why calls with this batch size cannot be exact; None if they can."""
        if self.inexact:
            more = f" and {len(self.inexact) - 1} more" if len(self.inexact) > 1 else ""
            return f"exact=True: {self.inexact[0]}{more} computes drafted tokens otherwise than single ones"
        return "exact=True is for calls with one row" if batch_size > 1 else None


_found: WeakKeyDictionary[PreTrainedModel, list[tuple[Any, Exactness]]] = WeakKeyDictionary()


def exactness(model: PreTrainedModel, able: Capability) -> Exactness:
    """Probe the model with its own weights; keep the result until its settings or the number of threads change.

    Args:
        model: the target.
        able: its capability.

    Returns:
        Which modules give other bits; all of them in the name of the model if the probe failed.
    """
    known, state = _found.setdefault(model, []), (settings_of(model), torch.get_num_threads())
    for before, found in known:
        if before == state:
            return found
    log.info("probing whether %s gives drafts the bits of plain decoding", type(model).__name__)
    found = _probed(model, able)
    known[:] = [(state, found)]
    return found


@torch.no_grad()
def _probed(model: PreTrainedModel, able: Capability) -> Exactness:
    if any(weight.device.type != "cpu" for weight in model.parameters()):
        return Exactness(("a model on a device",))
    if model.config.is_encoder_decoder:
        return Exactness(("cross-attention",))
    if is_sharded(model):
        return Exactness(("a sharded model",))
    try:
        own = apart(in_eval_mode(model))
        with short_windows(own):
            return _repaired(own, able)
    except Exception as error:  # whatever a model's modules raise when nodes run alone
        log.info("the probe of exactness failed: %s: %s", type(error).__name__, error)
        return Exactness((type(model).__name__,))


def _repaired(own: PreTrainedModel, able: Capability) -> Exactness:
    calls: list[_Calls] = []
    for name, module in own.named_modules():
        module.register_forward_hook(partial(_keep, calls, name), with_kwargs=True)
    plain = _plain_calls(own, able, calls)
    alone: set[str] = set()
    for _ in range(REPAIRS):
        ours = _draft_calls(own, able, calls, alone)
        differing = _culprits(plain, ours)
        if not differing:
            return Exactness((), tuple(sorted(alone)), _cost(own, able, alone))
        more = {runnable for name in differing if (runnable := _runnable_alone(name, ours, alone))}
        if not more:
            break
        alone |= more
    return Exactness(tuple(sorted(differing)), tuple(sorted(alone)))


# Passes


def _parents(able: Capability) -> tuple[int, ...]:
    return PARENTS if able.trees else CHAIN


def _plain_calls(own: PreTrainedModel, able: Capability, calls: list[_Calls]) -> list[_Calls]:
    """For each node, what the modules took and gave in the model's own pass over it alone."""
    parents, ids = _parents(able), token_ids(own, PROMPT + len(PARENTS))
    kept, past = [], cache_argument(own)
    for node in range(len(parents)):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        cache = run_plainly(own, ids[None, :PROMPT], 0, use_cache=True)[past]
        for i, each in enumerate(path):
            with _listening(calls) as heard:
                token = ids[None, PROMPT + each : PROMPT + each + 1]
                cache = run_plainly(own, token, PROMPT + i, use_cache=True, **{past: cache})[past]
        kept.append(heard)
    return kept


def _draft_calls(own: PreTrainedModel, able: Capability, calls: list[_Calls], alone: set[str]) -> _Calls:
    """What the modules took and gave in one exact pass over all nodes."""
    grow = _drafting(own, able, alone)
    with _listening(calls) as heard:
        grow()
    return heard


def _drafting(own: PreTrainedModel, able: Capability, exact: set[str] | None) -> Callable[[], Tensor]:
    """A function that runs the probe's draft over the probe's prompt, and gives its logits (1, N, V)."""
    parents, ids = _parents(able), token_ids(own, PROMPT + len(PARENTS))
    runner = ModelRunner(own, able.masks, encoder_outputs=stand_in(own, 1), exact=exact)
    runner.start(1)
    runner.extend(ids[None, :PROMPT], [0])
    tokens = ids[None, PROMPT : PROMPT + len(parents)]
    draft = DraftTree(tokens, torch.tensor([parents], device=ids.device))

    def grow() -> Tensor:
        logits = runner.grow(tokens, draft.depth, draft.ancestors, chain=not able.trees).logits
        runner.commit([0])
        return logits

    return grow


def _cost(own: PreTrainedModel, able: Capability, alone: set[str]) -> float:
    usual, exact = _drafting(own, able, None), _drafting(own, able, alone)
    seconds: dict[Any, list[float]] = {usual: [], exact: []}
    for _ in range(TRIES):
        for grow, taken in seconds.items():
            start = perf_counter()
            grow()
            taken.append(perf_counter() - start)
    return min(seconds[exact]) / min(seconds[usual])


# What modules take and give


@dataclass
class _Calls:
    """First tensor that each module took and gave, by its name; names of modules that used the cache."""

    taken: dict[str, Tensor] = field(default_factory=dict)
    given: dict[str, Tensor] = field(default_factory=dict)
    cached: set[str] = field(default_factory=set)


@contextmanager
def _listening(calls: list[_Calls]) -> Iterator[_Calls]:
    calls.append(_Calls())
    try:
        yield calls[-1]
    finally:
        calls.pop()


def _keep(calls: list[_Calls], name: str, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    if not calls:
        return
    taken = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
    given = output if isinstance(output, Tensor) else _first_tensor(output)
    if taken is not None and given is not None:
        calls[-1].taken[name], calls[-1].given[name] = taken, given
    if any("past" in each or "cache" in each for each in kwargs if kwargs[each] is not None):
        calls[-1].cached.add(name)


def _first_tensor(output: Any) -> Tensor | None:
    values = output.values() if isinstance(output, dict) else output if isinstance(output, (tuple, list)) else ()
    return next((value for value in values if isinstance(value, Tensor)), None)


def _culprits(plain: list[_Calls], ours: _Calls) -> set[str]:
    """Modules whose inputs agree for every node and whose outputs do not, without those that only contain such ones.

    If some output differs and no such module is found, the module with the differing output itself.
    """

    def agrees(name: str, which: str) -> bool:
        mine = getattr(ours, which)[name]
        return all(_same(mine, getattr(calls, which).get(name), i, len(plain)) for i, calls in enumerate(plain))

    names = [name for name in ours.given if name in plain[0].given]
    wrong = {name for name in names if not agrees(name, "given")}
    culprits = {name for name in wrong if agrees(name, "taken")}
    return {name for name in culprits if not any(other != name and _within(other, name) for other in culprits)} or (
        {""} if wrong else set()
    )


def _within(name: str, other: str) -> bool:
    return not other or name.startswith(other + ".")


def _same(ours: Tensor, plain: Tensor | None, node: int, nodes: int) -> bool:
    """Whether a node's part of (1, n, ...) or (n, ...) has the bits of a pass over it alone; True if not comparable."""
    if plain is None:
        return True
    if ours.dim() > 1 and ours.shape[1] == nodes and plain.shape[1:2] == (1,):
        mine, theirs = ours[:, node], plain[:, 0]
    elif ours.shape[:1] == (nodes,) and plain.shape[:1] == (1,):
        mine, theirs = ours[node], plain[0]
    else:
        return True
    return mine.shape != theirs.shape or torch.equal(mine, theirs)


def _runnable_alone(name: str, ours: _Calls, alone: set[str]) -> str | None:
    """The module itself or the nearest around it that takes and gives (1, n, ...) and uses no cache."""
    while name and (name in alone or name in ours.cached or not _by_node(ours, name)):
        if name in ours.cached:
            return None
        name = name.rpartition(".")[0]
    return name or None


def _by_node(ours: _Calls, name: str) -> bool:
    if name not in ours.taken:
        return False
    taken, given = ours.taken[name], ours.given[name]
    return taken.dim() == given.dim() == 3 and taken.shape[1] == given.shape[1]
