"""`StaticForward`: runs draft passes at a few padded sizes over a static cache, optionally through `torch.compile`.

A size is captured at its second use, and kept only if the captured pass gives the model's logits. A captured pass uses
tensors only, no Python state. CUDA-graph capture is in `models/cuda_graphs.py`.
"""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from specdec.models.compat import CACHE
from specdec.models.compiled_layers import with_compiled_layers
from specdec.models.decoding_view import CurrentView, decoding_view
from specdec.models.hidden_states import Taps
from specdec.models.introspection import decoder_layers, device_of, is_sharded
from specdec.models.positions import counts_positions, has_causal_masks
from specdec.models.recurrent_layers import has_states
from specdec.utils.timing import lose

log = logging.getLogger(__name__)

BACKEND = "inductor"
MOST = 32  # captured sizes per model; passes of further sizes run eagerly
WRONG = {torch.float32: 1e-3, torch.float64: 1e-3}  # tolerance of logits, in standard deviations; 0.1 for other dtypes
Key = tuple[Any, ...]
Passed = tuple[Tensor, Tensor | None]  # logits and features
Written = Mapping[int, tuple[Tensor, Tensor, Tensor]]  # by layer: key and value buffers, slots (B, n) to write


def nodes_of_size(count: int) -> int:
    """The padded number of nodes per row: `count` rounded up to a power of two."""
    return 1 << (count - 1).bit_length()


def filled_up(tokens: Tensor, depth: Tensor, ancestors: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Pad to the next size with nodes that no other node sees; see `ModelRunner.grow`.

    Args:
        tokens: (B, n) int64, or embeddings (B, n, H).
        depth: (B, M + n) int64.
        ancestors: (B, n, M + n) bool; None for a chain.
    """
    B, n = tokens.shape[:2]
    more = nodes_of_size(n) - n
    if not more:
        return tokens, depth, ancestors
    pad = torch.nn.functional.pad
    if ancestors is not None:
        alone = torch.eye(more, dtype=torch.bool, device=tokens.device).expand(B, more, more)
        ancestors = torch.cat([pad(ancestors, (0, more)), pad(alone, (ancestors.shape[2], 0))], 1)
    depth = torch.cat([depth, depth[:, -1:].expand(B, more)], 1)  # repeat the last depth: positions may be limited
    return pad(tokens, (0, 0) * (tokens.dim() - 2) + (0, more)), depth, ancestors


def cannot_capture(model: PreTrainedModel) -> str | None:
    """The reason why a model's structure rules out capture; None if it does not."""
    if model.config.is_encoder_decoder:
        return "its decoder also reads encoder outputs"
    if counts_positions(model):
        return "it computes its positions itself"
    if has_states(model):
        return "its recurrent layers keep their states in Python objects"
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        return "accelerate's hooks move its weights or inputs"
    if has_causal_masks(model):
        return "its attention applies a causal mask of fixed length in addition to ours"
    if is_sharded(model):
        return "its weights are sharded over several processes"
    return None


class SlottedCache(Cache):
    """The cache of a captured pass: tensors of fixed shapes, whose contents change from pass to pass."""

    is_compileable = True

    def __init__(self, written: Written) -> None:
        super().__init__(layers=[])
        self.written = written
        slots = next(iter(written.values()))[2]
        self._rows = torch.arange(len(slots), device=slots.device)[:, None]

    def of_layer(self, layer_idx: int) -> SlottedCache:
        """The cache of one layer, which has index 0 in it."""
        return SlottedCache({0: self.written[layer_idx]})

    def fixed_buffers(self, layer_idx: int) -> tuple[Tensor, Tensor, Tensor]:
        """A layer's whole key and value buffers, and the slots (B, n) int64 that this pass writes."""
        return self.written[layer_idx]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write (B, heads, n, dim) into the layer's slots; return its whole buffers."""
        keys, values, slots = self.written[layer_idx]
        # Not `scatter_`, for which inductor copies the whole buffer.
        keys[self._rows, :, slots] = key_states.transpose(1, 2)
        values[self._rows, :, slots] = value_states.transpose(1, 2)
        return keys, values

    # Read by transformers' mask builders, which get finished masks (5.17 to 5.24)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int = 0) -> tuple[int, int]:
        return next(iter(self.written.values()))[0].shape[2], 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1


class StaticForward:
    """Captured passes of one model, shared by all calls.

    Args:
        model: the model itself, not a `with_fast_linears` view: the compiler chooses the kernels.
        taps: hidden states to capture in each pass.
        compiled: compile the layers for each size with `torch.compile`; else run the model's own code, on CUDA its
            `decoding_view`.

    Attributes:
        refused: the reason why capture is disabled; empty while it is enabled.
    """

    def __init__(self, model: PreTrainedModel, taps: Taps | None = None, compiled: bool = True):
        self.model, self.taps, self.compiled, self.refused = model, taps, compiled, ""
        self._compiles = compiled  # False once the model's own code runs instead
        self._captured: dict[Key, bool] = {}  # by size; False: a size used once
        self._announced = False  # the notice that compilation takes a while
        self._view: CurrentView | None = None  # the view that runs captured passes; None for the model itself
        if compiled:
            try:
                decoder_layers(model)
            except ValueError as error:
                self._give_up_view(str(error))
            else:
                self._view = CurrentView(model, partial(with_compiled_layers, backend=BACKEND))
        elif device_of(model).type == "cuda":
            self._view = CurrentView(model, decoding_view)

    def __len__(self) -> int:
        return sum(self._captured.values())

    def __call__(self, written: Written, inputs: Mapping[str, Any], own: Callable[[], Passed]) -> Passed:
        """Logits (B, n, V) and features (B, n, C) of a pass.

        Args:
            written: the cache's buffers and the slots to write, by layer.
            inputs: arguments of the model's forward pass, except the cache.
            own: runs the same pass eagerly.
        """
        if self.refused:
            return own()
        key = _sizes(written, inputs)
        if key not in self._captured:
            self._captured[key] = False
            return own()
        model = self.model if self._view is None else self._view.current()
        arguments = (model, SlottedCache(written), _in_order(inputs), self.taps)
        if not self._captured[key]:
            return own() if len(self) == MOST else self._capture(key, arguments, own())
        try:
            return _pass(*arguments)
        except Exception as error:  # layers were changed to what cannot be compiled
            self._refuse(_said(error))
            return own()

    def _capture(self, key: Key, arguments: tuple[Any, ...], right: Passed) -> Passed:
        """Capture a size and check it against `right`, the eager pass. Writing the same keys again changes nothing.

        Returns the captured pass if it is right: later ones must not differ from it by rounding.
        """
        start = perf_counter()
        gc.collect()  # unreferenced generators: their hooks must not be removed while torch reads the model's hooks
        name = type(self.model).__name__
        if self._compiles and not self._announced:
            log.warning("compiling passes of %s: torch keeps their code for later processes", name)
            self._announced = True
        log.info("capturing %s for %d nodes", name, right[0].shape[1])
        passed, reason = right, ""
        try:
            passed = _pass(*arguments)
            apart = _distance(passed[0], right[0])
            if not apart <= WRONG.get(right[0].dtype, 0.1):
                reason = f"logits of the captured pass differ by {apart:.2g} standard deviations from the model's"
        except Exception as error:  # models that cannot be captured fail with many types
            reason = _said(error)
        lose(perf_counter() - start)  # a one-time cost
        if not reason:
            self._captured[key] = True
            return passed
        if arguments[0] is self.model:
            self._refuse(reason)
        else:
            self._give_up_view(reason)
        if self.refused:
            return right
        model = self.model if self._view is None else self._view.current()
        return self._capture(key, (model, *arguments[1:]), right)

    def _give_up_view(self, reason: str) -> None:
        """Go on without a view that failed: without compiled layers on CUDA, or with the model itself."""
        name, on_gpu = type(self.model).__name__, device_of(self.model).type == "cuda"
        if self._compiles and not on_gpu:
            self._refuse(reason)
        elif self._compiles:
            warnings.warn(f"specdec: {name} runs without torch.compile: {reason}", stacklevel=2)
            self._compiles, self._view = False, CurrentView(self.model, decoding_view)
        else:
            log.info("%s runs its own layers: %s", name, reason)
            self._view = None

    def _refuse(self, reason: str) -> None:
        self.refused = reason
        self._captured = {}
        warnings.warn(f"specdec: {type(self.model).__name__} runs without graphs: {reason}", stacklevel=2)


def _pass(model: PreTrainedModel, cache: Cache, inputs: dict[str, Any], taps: Taps | None) -> Passed:
    if taps is None:
        return model(**inputs, **{CACHE: cache}).logits, None
    with taps.listening() as taken:
        logits = model(**inputs, **{CACHE: cache}).logits
    return logits, taps.features(taken)


def _distance(ours: Tensor, right: Tensor) -> float:
    """Largest mean distance of a node's logits, in standard deviations."""
    ours, right = ours.float(), right.float()
    return float((ours - right).abs().mean(-1).max() / right.std().clamp(min=1e-6))


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:160]}"


def _in_order(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Contiguous inputs, since a graph is specialised on strides as well as shapes."""
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
