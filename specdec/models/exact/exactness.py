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
from specdec.models.encoder import declined
from specdec.models.exact.prompts import read_as_plain
from specdec.models.introspection import cache_argument, is_sharded, takes_positions
from specdec.models.probe import token_ids
from specdec.models.runner import ModelRunner
from specdec.models.views import apart, in_eval_mode
from specdec.sampling.draft_tree import DraftTree

log = logging.getLogger(__name__)

PROMPT = 9  # tokens of the longest prompt
PARENTS = (-1, 0, 1, 2, 1, 0)  # of the nodes of the probe's tree
CHAIN = (-1, 0, 1, 2)  # for a model that can run nothing else
REPAIRS = 4  # attempts to run more modules for each node alone
TRIES = 3  # timed passes; the fastest counts
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # in configs


@dataclass(frozen=True)
class Exactness:
    """Result of the probe.

    Attributes:
        inexact: names of the modules whose outputs differ from plain decoding's although their inputs agree, or
            another reason why drafts cannot be exact; empty if all bits agree.
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

    @property
    def problem(self) -> str | None:
        """Why calls cannot be exact; None if they can."""
        if self.exact:
            return None
        more = f" and {len(self.inexact) - 1} more" if len(self.inexact) > 1 else ""
        return f"exact=True: {self.inexact[0]}{more} computes drafted tokens otherwise than single ones"


_found: WeakKeyDictionary[PreTrainedModel, dict[Any, Exactness]] = WeakKeyDictionary()


def exactness(model: PreTrainedModel, able: Capability, rows: int = 1, padded: bool = False) -> Exactness:
    """Probe the model with its own weights; keep the result until its settings or the number of threads change.

    Args:
        model: the target.
        able: its capability.
        rows: number of rows of a call.
        padded: True if some of them are left-padded.

    Returns:
        Which modules give other bits; all of them in the name of the model if the probe failed.
    """
    state = repr((settings_of(model), torch.get_num_threads()))
    known = _found.setdefault(model, {})
    if known and next(iter(known))[0] != state:
        known.clear()
    kind = state, rows > 1, padded
    if kind not in known:
        log.info("probing whether %s gives drafts the bits of plain decoding", type(model).__name__)
        known[kind] = _probed(model, able, rows > 1, padded)
    return known[kind]


@torch.no_grad()
def _probed(model: PreTrainedModel, able: Capability, batched: bool, padded: bool) -> Exactness:
    config = model.config.get_text_config(decoder=True)
    reasons = {
        "a model on a device": any(weight.device.type != "cpu" for weight in model.parameters()),
        "an encoder-decoder": model.config.is_encoder_decoder,
        "a sharded model": is_sharded(model),
        "a mixture of experts in a batch": batched and any(getattr(config, name, None) for name in EXPERTS),
    }
    for reason, holds in reasons.items():
        if holds:
            return Exactness((reason,))
    try:
        own = apart(in_eval_mode(model))
        with short_windows(own):
            return _Trial(own, able, [0, 3 * padded] if batched else [2 * padded]).result()
    except Exception as error:  # whatever a model's modules raise when nodes run alone
        log.info("the probe of exactness failed: %s: %s", type(error).__name__, error)
        return Exactness((type(model).__name__,))


class _Trial:
    """A draft after a prompt for each row, read by the model and by exact passes.

    Args:
        own: a copy of the model that shares its weights. Hooks are registered on it.
        able: the model's capability.
        pads: padding columns before each row's prompt.
    """

    def __init__(self, own: PreTrainedModel, able: Capability, pads: list[int]):
        self.own, self.able, self.pads = own, able, pads
        self.parents = PARENTS if able.trees else CHAIN
        ids = token_ids(own, len(pads) * (PROMPT + len(self.parents))).view(len(pads), -1)
        self.prompts, self.nodes = ids[:, :PROMPT], ids[:, PROMPT:]
        self.calls: list[_Calls] = []  # of the pass that is listened to
        for name, module in own.named_modules():
            module.register_forward_hook(partial(_keep, self.calls, name), with_kwargs=True)

    def result(self) -> Exactness:
        plain = [self._plain_calls(node) for node in range(len(self.parents))]
        alone: set[str] = set()
        for _ in range(REPAIRS):
            ours = self._draft_calls(alone)
            differing = self._mixing(ours) or _culprits(plain, ours)
            if not differing:
                return Exactness((), tuple(sorted(alone)), self._cost(alone))
            more = {runnable for name in differing if (runnable := _runnable_alone(name, ours, alone))}
            if not more:
                break
            alone |= more
        names = (name or type(self.own).__name__ for name in differing)
        return Exactness(tuple(sorted(names)), tuple(sorted(alone)))

    def _plain_calls(self, node: int) -> _Calls:
        """What the modules took and gave in the model's own pass over one node per row."""
        path = [node]
        while self.parents[path[0]] >= 0:
            path.insert(0, self.parents[path[0]])
        real = torch.arange(PROMPT) >= torch.tensor(self.pads)[:, None]
        cache = self._plain_pass(self.prompts, real, None)
        for each in path:
            real = torch.nn.functional.pad(real, (0, 1), value=True)
            with _listening(self.calls) as heard:
                cache = self._plain_pass(self.nodes[:, each : each + 1], real, cache)
        return heard

    def _plain_pass(self, tokens: Tensor, real: Tensor, cache: Any) -> Any:
        """Run the model as `generate()` does over the last columns of `real` (B, C), and return its cache."""
        name = cache_argument(self.own)
        inputs = {"input_ids": tokens, "attention_mask": real.long(), "use_cache": True, "return_dict": True}
        if takes_positions(self.own):
            inputs["position_ids"] = (real.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        return self.own(**inputs, **declined(self.own), **({} if cache is None else {name: cache}))[name]

    def _draft_calls(self, alone: set[str]) -> _Calls:
        """What the modules took and gave in one exact pass over all nodes."""
        grow = self._drafting(alone)
        with _listening(self.calls) as heard:
            grow()
        return heard

    def _drafting(self, exact: set[str] | None) -> Callable[[], Any]:
        """A function that runs the draft after the prompts, and rolls it back."""
        runner = self.runner = ModelRunner(self.own, self.able.masks, exact=exact)
        runner.start(len(self.pads))
        if exact is not None and any(self.pads):
            read_as_plain(runner, self.prompts, self.pads)
        else:
            runner.extend(self.prompts, self.pads)
        draft = DraftTree(self.nodes, torch.tensor(self.parents).expand(len(self.pads), -1))

        def grow() -> None:
            runner.grow(self.nodes, draft.depth, draft.ancestors, chain=not self.able.trees)
            runner.commit([0] * len(self.pads))

        return grow

    def _mixing(self, ours: _Calls) -> set[str]:
        """Modules that use the cache by code of their own, whose result may depend on the length of the text."""
        innermost = {name for name in ours.cached if not any(_within(other, name) for other in ours.cached - {name})}
        exact = {name for name, module in self.runner.draft_model.named_modules() if hasattr(module, "_draft_pass")}
        return innermost - exact or ({""} if not innermost else set())

    def _cost(self, alone: set[str]) -> float:
        usual, exact = self._drafting(None), self._drafting(alone)
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
