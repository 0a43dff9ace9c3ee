"""`fingerprint`: everything in Python that the passes of a model depend on, so that a CUDA graph may outlive a call."""

from __future__ import annotations

from collections.abc import Hashable, Sequence, Set, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from specdec.models.hidden_states import foreign_hooks

INTERNAL = frozenset(vars(nn.Module()))  # attributes of every module; those that matter are read by name
PLAIN = {str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size}
SMALL = 64  # entries of a tensor that counts by value
DEEPEST = 8  # levels of containers that are looked into
LONGEST = 1024  # entries of such a container; a longer one is no setting, but for example a memory of texts


@dataclass(frozen=True, eq=False)
class Same:
    """An object that equals only itself. It is kept alive, so that no other object gets its id."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def fingerprint(value: Any, hooks: bool = False) -> Hashable | None:
    """Describe an object by what a captured function could have read of it in Python.

    Numbers, texts and settings count by value. Tensors count by their memory, and small ones on the CPU by value as
    well: a captured function reads the others again at each replay. Anything else counts as itself.

    Args:
        value: a module, a config, a logits processor, a proposer, or a container of such.
        hooks: describe hooks and replaced forward passes by the functions that they are. Their code may read anything.

    Returns:
        A hashable value; None for a module with hooks or a replaced forward pass, unless `hooks`, and for tensors whose
        memory is not known.

    Examples:
        >>> fingerprint({"temperature": 0.7}) == fingerprint({"temperature": 0.7})
        True
        >>> layer = nn.Linear(2, 2)
        >>> before = fingerprint(layer)
        >>> before == fingerprint(layer), before == fingerprint(layer.train(False))
        (True, False)
    """
    try:
        return _Descriptions(hooks).of(value, 0)
    except _Unknown:
        return None


class _Unknown(Exception):
    """An object may depend on anything."""


class _Descriptions:
    """Describes values, and remembers modules, which may refer to each other, and configs, which they share."""

    def __init__(self, hooks: bool):
        self._hooks, self._seen = hooks, dict[int, Hashable]()

    def of(self, value: Any, level: int) -> Hashable:
        kind = type(value)
        if kind in PLAIN:
            return kind, value
        if isinstance(value, nn.Module):
            return tuple(self._of_module(module, level) for module in value.modules())
        if isinstance(value, Tensor):
            if value.device.type == "cpu" and value.numel() <= SMALL:
                return value.dtype, value.shape, tuple(value.flatten().tolist())
            return self._memory(value)
        if isinstance(value, PretrainedConfig):
            if id(value) not in self._seen:
                self._seen[id(value)] = self.of(vars(value), level)
            return self._seen[id(value)]
        if level == DEEPEST or (isinstance(value, Sized) and len(value) > LONGEST):
            return Same(value)
        if isinstance(value, dict):  # no other mapping is a setting, and threads fill those with weak keys
            return tuple((name, self.of(each, level + 1)) for name, each in value.copy().items())
        if isinstance(value, (Sequence, Set)):
            return kind, tuple(self.of(each, level + 1) for each in value)
        return Same(value)

    def _of_module(self, module: nn.Module, level: int) -> Hashable:
        if id(module) in self._seen:
            return self._seen[id(module)]
        same = self._seen[id(module)] = Same(module)
        own = vars(module)
        replaced = [*foreign_hooks(module), own.get("forward"), own.get("_compiled_call_impl")]
        if not self._hooks and any(code is not None for code in replaced):
            raise _Unknown
        held = [*module._parameters.values(), *module._buffers.values()]
        tensors = [tensor is not None and self._memory(tensor) for tensor in held]
        settings = [(name, self.of(each, level + 1)) for name, each in [*own.items()] if name not in INTERNAL]
        code = [Same(code) for code in (getattr(type(module), "forward", None), *replaced)]
        children = [(name, Same(child)) for name, child in module._modules.items()]
        return same, Same(type(module)), module.training, *code, *tensors, *children, *settings

    def _memory(self, tensor: Tensor) -> Hashable:
        """Describe where a graph reads a tensor, and how."""
        address = tensor.data_ptr()
        if not address and tensor.numel():  # it consists of others, for example quantised weights
            if not self._hooks:
                raise _Unknown
            return Same(tensor)
        return address, tensor.device, tensor.dtype, tensor.shape, tensor.stride()


def settings(value: object) -> Hashable | None:
    """Describe an object that is not a module by its attributes, for example a logits processor; None as above.

    Examples:
        >>> from transformers import TemperatureLogitsWarper
        >>> settings(TemperatureLogitsWarper(0.7)) == settings(TemperatureLogitsWarper(0.8))
        False
    """
    described = fingerprint(vars(value)) if hasattr(value, "__dict__") else Same(value)
    return None if described is None else (type(value), described)
