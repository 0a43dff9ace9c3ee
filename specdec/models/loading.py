"""Load a model from a folder or a hub id, with the class that its config names."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import transformers
from huggingface_hub.errors import HFValidationError
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from specdec.models.hardware import DTYPES
from specdec.models.introspection import device_of
from specdec.models.number_format import convert
from specdec.utils.parsing import read_by_library
from specdec.utils.paths import require_folder_or_id


def is_block(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json describes a DFlash drafter or one of its kin, in any layout."""
    kind = str(config.get("speculators_model_type", ""))
    names = [kind, *(config.get("architectures") or ())]
    return any(word in str(name).lower() for word in ("dflash", "dspark", "domino") for name in names) or (
        not kind and config.get("mask_token_id") is not None and config.get("target_layer_ids") is not None
    )


log = logging.getLogger(__name__)


def load(path: str, like: PreTrainedModel | None = None, **placed: Any) -> PreTrainedModel:
    """Load a model in the precision it was saved in, or in the precision and on the device of another model.

    Args:
        path: folder or hub id.
        like: model whose dtype and device to use; None: the saved dtype, placed by `placed`.
        placed: placement arguments of `from_pretrained`, such as `device_map`.

    Raises:
        ValueError: `path` holds a draft head, or cannot be read as a model.
    """
    require_folder_or_id(path)
    log.info("loading %s", path)
    try:
        with read_by_library(path):
            config, _ = PretrainedConfig.get_config_dict(path)
            if is_block(config):
                raise ValueError(
                    f'{path!r} is a block-parallel drafter, not a model: pass "dflash:{path}" as the proposer'
                )
            if "draft_vocab_size" in config or "speculators_model_type" in config:
                raise ValueError(f'{path!r} is an EAGLE head, not a model: pass "eagle3:{path}" as the proposer')
            model = _class_of(config).from_pretrained(path, dtype="auto", **placed).eval()
    except (OSError, HFValidationError) as error:
        raise ValueError(
            f"{path} is neither a folder with a model nor a hub repository that can be reached: {error}"
        ) from error
    if like is None:
        return model
    # A quantized model's dtype may be a storage format that other models cannot compute in.
    return convert(model, like.dtype if like.dtype in DTYPES.values() else model.dtype).to(device_of(like))


def _class_of(config: dict[str, Any]) -> Any:
    """Return the class to load with: an encoder-decoder's own class, else AutoModelForCausalLM."""
    name = (config.get("architectures") or [""])[0]
    return (
        getattr(transformers, name, AutoModelForCausalLM) if config.get("is_encoder_decoder") else AutoModelForCausalLM
    )
