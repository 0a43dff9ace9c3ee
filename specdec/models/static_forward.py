"""`StaticForward`: a model's passes over drafts, of few sizes and of nothing but tensors, so that they can be captured.

Owns the sizes there are, what a captured pass is given instead of Python state, and capturing: at a size's second use,
and only if the graph's logits are the model's; as the model's own kernels, or with code by `torch.compile`. How a
device launches it is `recording`'s affair. Knows nothing of sampling, of trees, or of when a draft pays.
"""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable, Mapping
from time import perf_counter
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from specdec.models.compat import CACHE
from specdec.models.hidden_states import Taps
from specdec.models.introspection import is_sharded
from specdec.models.positions import counts_positions, has_causal_masks
from specdec.models.recurrent_layers import has_states
from specdec.utils.timing import lose

log = logging.getLogger(__name__)

BACKEND = "inductor"
MOST = 32  # graphs of a model: what comes in more sizes than that is run without
WRONG = {torch.float32: 1e-3, torch.float64: 1e-3}  # standard deviations by which a node's logits may differ; else 0.1
Key = tuple[Any, ...]
Passed = tuple[Tensor, Tensor | None]  # logits and features
Pass = Callable[..., Passed]
Written = Mapping[int, tuple[Tensor, Tensor, Tensor]]  # by layer: buffers of keys and values, slots (B, n) to write


def nodes_of_size(count: int) -> int:
    """Nodes per row of the size that so many are run in: powers of two."""
    return 1 << (count - 1).bit_length()


def filled_up(tokens: Tensor, depth: Tensor, ancestors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Nodes up to the next size: behind the others, seen by nobody but themselves.

    Args:
        tokens: (B, n), or (B, n, H). depth: (B, M + n). ancestors: (B, n, M + n); see `ModelRunner.grow`.
    """
    B, n = tokens.shape[:2]
    more = nodes_of_size(n) - n
    if not more:
        return tokens, depth, ancestors
    pad = torch.nn.functional.pad
    alone = torch.eye(more, dtype=torch.bool, device=tokens.device).expand(B, more, more)
    rows = torch.cat([pad(ancestors, (0, more)), pad(alone, (ancestors.shape[2], 0))], 1)
    depth = torch.cat([depth, depth[:, -1:].expand(B, more)], 1)  # where a row stands already: positions may run out
    return pad(tokens, (0, 0) * (tokens.dim() - 2) + (0, more)), depth, rows


def cannot_capture(model: PreTrainedModel) -> str | None:
    """Why passes of a model are not tried to be captured, by its structure; None: they are."""
    if model.config.is_encoder_decoder:
        return "its decoder also reads what its encoder wrote"
    if counts_positions(model):
        return "it counts its positions by itself"
    if has_states(model):
        return "its recurrent layers keep states that are Python's affair"
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        return "accelerate's hooks move its weights or inputs"
    if has_causal_masks(model):
        return "its attention has a causal mask of fixed length beside ours"
    if is_sharded(model):
        return "its weights lie in several processes"
    return None


class SlottedCache(Cache):
    """The cache as a captured pass sees it: nothing but tensors of one size, which change from pass to pass."""

    is_compileable = True

    def __init__(self, written: Written) -> None:
        super().__init__(layers=[])
        self.written = written

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write (B, heads, n, dim) into the layer's slots; return its whole buffers."""
        keys, values, slots = self.written[layer_idx]
        at = slots[:, None, :, None].expand_as(key_states)
        keys.scatter_(2, at, key_states)
        values.scatter_(2, slots[:, None, :, None].expand_as(value_states), value_states)
        return keys, values

    # What mask builders ask, which get masks that are made (transformers 5.17 to 5.24)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int = 0) -> tuple[int, int]:
        return next(iter(self.written.values()))[0].shape[2], 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1


class StaticForward:
    """Of one model, for all calls that run it so.

    Args:
        model: as it is, not a `with_fast_linears` view: which way to multiply is the compiler's affair. taps: states to take along.
        compiled: one full graph per size by `torch.compile`, with code of its own; else the pass as it is.

    Attributes:
        refused: why nothing is captured any more; empty while it is.
    """

    def __init__(self, model: PreTrainedModel, taps: Taps | None = None, compiled: bool = True):
        self.model, self.taps, self.compiled, self.refused = model, taps, compiled, ""
        self._static_forward: dict[Key, Pass | None] = {}  # None: of a size that was met once
        self._announced = False  # that it takes a while

    def __len__(self) -> int:
        return sum(graph is not None for graph in self._static_forward.values())

    def __call__(self, written: Written, inputs: Mapping[str, Any], own: Callable[[], Passed]) -> Passed:
        """Logits (B, n, V) and features of a pass; inputs: of the model's forward pass, but for the cache. own: makes
        the same pass without a graph."""
        if self.refused:
            return own()
        key = _sizes(written, inputs)
        if key not in self._static_forward:
            self._static_forward[key] = None
            return own()
        arguments = (self.model, SlottedCache(written), _in_order(inputs), self.taps)
        graph = self._static_forward[key]
        if graph is None:
            return own() if len(self) == MOST else self._captured(key, arguments, own())
        try:
            return graph(*arguments)
        except Exception as error:  # torch takes the model for another one: a hook came, or a setting changed
            self._refuse(_said(error))
            return own()

    def _captured(self, key: Key, arguments: tuple[Any, ...], right: Passed) -> Passed:
        """right: what the model's own pass gave. Writing the same keys and values once more changes nothing."""
        start = perf_counter()
        gc.collect()  # generators that nobody holds: their hooks must not go while torch looks at the model's
        name = type(self.model).__name__
        if self.compiled and not self._announced:
            log.warning("compiling passes of %s, a minute or so each: torch keeps their code for later processes", name)
            self._announced = True
        log.info("capturing %s for %d nodes", name, right[0].shape[1])
        try:
            graph = _compiled() if self.compiled else _pass
            ours = graph(*arguments)[0].float()
        except Exception as error:  # what cannot be captured says so in many ways
            self._refuse(_said(error))
        else:
            theirs = right[0].float()
            apart = float((ours - theirs).abs().mean(-1).max() / theirs.std().clamp(min=1e-6))
            if apart <= WRONG.get(right[0].dtype, 0.1):
                self._static_forward[key] = graph
            else:
                self._refuse(f"its logits came out wrong by {apart:.2g} standard deviations")
        lose(perf_counter() - start)  # no pass costs this again
        return right

    def _refuse(self, reason: str) -> None:
        self.refused = reason
        self._static_forward = {}
        warnings.warn(f"specdec: {type(self.model).__name__} runs without graphs: {reason}", stacklevel=2)


def _pass(model: PreTrainedModel, cache: Cache, inputs: dict[str, Any], taps: Taps | None) -> Passed:
    if taps is None:
        return model(**inputs, **{CACHE: cache}).logits, None
    with taps.listening() as taken:
        logits = model(**inputs, **{CACHE: cache}).logits
    return logits, taps.features(taken)


def _compiled() -> Pass:
    """`_pass` with code of its own: torch counts graphs, and gives up on too many, by code.

    Not by "reduce-overhead", which takes no graph that writes to inputs whose memory may move, as a cache's does: how a
    device launches it is `recording`'s affair.
    """
    own = FunctionType(_pass.__code__.replace(), _pass.__globals__)
    return torch.compile(own, fullgraph=True, dynamic=False, backend=BACKEND)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:160]}"


def _in_order(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The same in memory of their own: a graph is one of strides, too."""
    return {
        name: _in_order(given)
        if isinstance(given, Mapping)
        else given.contiguous()
        if isinstance(given, Tensor)
        else given
        for name, given in inputs.items()
    }


def _sizes(written: Written, inputs: Mapping[str, Any]) -> Key:
    buffers = tuple(keys.shape for keys, _, _ in written.values())
    return (*buffers, *((name, _size(given)) for name, given in inputs.items()))


def _size(given: Any) -> Any:
    if isinstance(given, Tensor):
        return given.shape
    return tuple(given) if isinstance(given, Mapping) else given
