"""`exactness`: finds out whether draft nodes get the bits of plain decoding, and in which modules they do not.

A pass over a small draft tree through the exact view is compared, bit by bit, with the model's own passes over one
token each. Every module's output is compared: a module whose inputs agree and whose outputs differ is run for each node
alone, if it can be. What still differs is reported.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.models.attention_masks import spans
from specdec.models.capability import REMEMBERED, Capability, settings_of, short_windows
from specdec.models.encoder import declined, stand_in
from specdec.models.exact.module_calls import ModuleCalls, culprits, keep, listening, runnable_alone, within
from specdec.models.exact.prompts import must_read_as_plain, read_as_plain
from specdec.models.exact.row_kernels import exact_target, has_row_kernels, on_device
from specdec.models.introspection import (
    CHUNKED,
    INDEXED,
    cache_argument,
    is_sharded,
    layer_kinds,
    takes_positions,
)
from specdec.models.kernels.launch import compiles_for
from specdec.models.probe import token_ids
from specdec.models.runner import ModelRunner
from specdec.models.views import apart, in_eval_mode
from specdec.sampling.draft_tree import DraftTree
from specdec.utils.recent import Recent

log = logging.getLogger(__name__)

HALF = (torch.bfloat16, torch.float16)
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
        inexact: names of the modules whose outputs differ from plain decoding's although their inputs agree, or may
            differ in longer texts.
        unsupported: a reason why the model was not probed, or why the probe failed.
        alone: names of the modules that have to run each node alone.
        cost: time of an exact pass over a small draft, relative to the usual pass over it.
    """

    inexact: tuple[str, ...] = ()
    unsupported: str = ""
    alone: tuple[str, ...] = ()
    cost: float = 1.0

    @property
    def exact(self) -> bool:
        """True if draft nodes get plain decoding's bits."""
        return not (self.inexact or self.unsupported)

    @property
    def problem(self) -> str | None:
        """Why calls cannot be exact; None if they can."""
        if self.unsupported:
            return f"exact=True is not supported for {self.unsupported}"
        if not self.inexact:
            return None
        more = f" and {len(self.inexact) - 1} more" if len(self.inexact) > 1 else ""
        return f"exact=True: {self.inexact[0]}{more} may compute drafted tokens otherwise than single ones"


_found: WeakKeyDictionary[PreTrainedModel, Recent[Exactness]] = WeakKeyDictionary()


def exactness(model: PreTrainedModel, able: Capability, rows: int = 1, padded: bool = False) -> Exactness:
    """Probe the model with its own weights. The result is kept for the model with its present modules and settings.

    Args:
        model: the target.
        able: its capability.
        rows: number of rows of a call.
        padded: True if some of them are left-padded.
    """

    def probed() -> Exactness:
        log.info("probing whether %s gives drafts the bits of plain decoding", type(model).__name__)
        return _probed(model, able, rows > 1, padded)

    state = settings_of(model), torch.get_num_threads(), rows > 1, padded
    return _found.setdefault(model, Recent(REMEMBERED)).get(state, probed)


@torch.no_grad()
def _probed(model: PreTrainedModel, able: Capability, batched: bool, padded: bool) -> Exactness:
    config = model.config.get_text_config(decoder=True)
    kinds, replaced = layer_kinds(config), [module for module in model.modules() if "forward" in vars(module)]
    reasons = {
        "models on a device without Triton": any(
            weight.device.type != "cpu" and not compiles_for(weight.device) for weight in model.parameters()
        ),
        f"{model.dtype} on a device (load it in bfloat16 or float16)": on_device(model) and model.dtype not in HALF,
        "sharded models": is_sharded(model),
        "mixtures of experts in a batch (but within exact())": batched
        and any(getattr(config, name, None) for name in EXPERTS)
        and not (on_device(model) or has_row_kernels(model)),
        "attention in chunks": CHUNKED in kinds or any(span.chunked for span in spans(model, able.masks or "own")),
        "attention with an indexer": INDEXED in kinds,
        "modules with a forward pass of their own": any(
            weight.dim() > 1 for module in replaced for weight in module.parameters()
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            return Exactness(unsupported=reason)
    try:
        own = exact_target(apart(in_eval_mode(model)))
        with short_windows(own):
            return _ExactnessProbe(own, able, [0, 3 * padded] if batched else [2 * padded]).result()
    except Exception as error:  # whatever a model's modules raise when nodes run alone
        return Exactness(unsupported=f"a {type(model).__name__}: {type(error).__name__} in the probe: {error}"[:200])


class _ExactnessProbe:
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
        self.encoder_outputs = stand_in(own, len(pads))
        self.calls: list[ModuleCalls] = []  # of the pass that is listened to
        for name, module in own.named_modules():
            module.register_forward_hook(partial(keep, self.calls, name), with_kwargs=True)

    def result(self) -> Exactness:
        plain = [self._plain_calls(node) for node in range(len(self.parents))]
        alone: set[str] = set()
        for _ in range(REPAIRS):
            ours = self._draft_calls(alone)
            differing = self._mixing(ours) or culprits(plain, ours)
            if not differing:
                return Exactness(alone=tuple(sorted(alone)), cost=self._cost(alone))
            more = {runnable for name in differing if (runnable := runnable_alone(name, ours, alone))}
            if not more:
                break
            alone |= more
        names = (name or type(self.own).__name__ for name in differing)
        return Exactness(tuple(sorted(names)), alone=tuple(sorted(alone)))

    def _plain_calls(self, node: int) -> ModuleCalls:
        """Record the modules' calls in the model's own pass over one node per row."""
        path = [node]
        while self.parents[path[0]] >= 0:
            path.insert(0, self.parents[path[0]])
        real = (torch.arange(PROMPT) >= torch.tensor(self.pads)[:, None]).to(self.nodes.device)
        cache = self._plain_pass(self.prompts, real, None)
        for each in path:
            real = torch.nn.functional.pad(real, (0, 1), value=True)
            with listening(self.calls) as heard:
                cache = self._plain_pass(self.nodes[:, each : each + 1], real, cache)
        return heard

    def _plain_pass(self, tokens: Tensor, real: Tensor, cache: Any) -> Any:
        """Run the model as `generate()` does over the last columns of `real` (B, C), and return its cache."""
        name = cache_argument(self.own)
        inputs = {"input_ids": tokens, "attention_mask": real.long(), "use_cache": True, "return_dict": True}
        if takes_positions(self.own):
            inputs["position_ids"] = (real.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        inputs |= declined(self.own) | ({} if cache is None else {name: cache})
        if self.encoder_outputs is not None:
            inputs = self.encoder_outputs.read_by(self.own, inputs)
        return self.own(**inputs)[name]

    def _draft_calls(self, alone: set[str]) -> ModuleCalls:
        """Record the modules' calls in one exact pass over all nodes."""
        grow = self._drafting(alone)
        with listening(self.calls) as heard:
            grow()
        return heard

    def _drafting(self, exact: set[str] | None) -> Callable[[], Any]:
        """A function that runs the draft after the prompts, and rolls it back."""
        runner = self.runner = ModelRunner(
            self.own, self.able.masks, encoder_outputs=stand_in(self.own, len(self.pads)), exact=exact
        )
        runner.start(len(self.pads))
        if must_read_as_plain(runner, self.pads):
            read_as_plain(runner, self.prompts, self.pads)
        else:
            runner.extend(self.prompts, self.pads)
        parents = torch.tensor(self.parents, device=self.nodes.device)
        draft = DraftTree(self.nodes, parents.expand(len(self.pads), -1))

        def grow() -> None:
            output = runner.grow(self.nodes, draft.depth, draft.ancestors, chain=not self.able.trees)
            output.logits[0, 0, 0].item()  # a device has ended the pass
            runner.commit([0] * len(self.pads))

        return grow

    def _mixing(self, ours: ModuleCalls) -> set[str]:
        """Modules whose result may depend on the length of the text, or on the number of nodes, in unknown ways.

        They use the cache by code of their own, or are linear layers whose input is not a vector per node.
        """
        assert self.runner.draft_pass is not None
        unknown = self.runner.draft_pass.unknown_layers
        modules = dict(self.runner.draft_model.named_modules())
        layers = {name for name, module in modules.items() if module in unknown}
        innermost = {name for name in ours.cached if not any(within(other, name) for other in ours.cached - {name})}
        handing_on = {type(modules[name]) for name in ours.cached - innermost}  # some layers have no part that reads it
        innermost = {name for name in innermost if type(modules[name]) not in handing_on}
        exact = {name for name, module in modules.items() if hasattr(module, "_draft_pass")}
        return layers | (innermost - exact) or ({""} if not innermost else set())

    def _cost(self, alone: set[str]) -> float:
        usual, exact = self._drafting(None), self._drafting(alone)
        seconds: dict[Any, list[float]] = {usual: [], exact: []}
        for _ in range(TRIES):
            for grow, taken in seconds.items():
                start = perf_counter()
                grow()
                taken.append(perf_counter() - start)
        return min(seconds[exact]) / min(seconds[usual])
