"""Loading a model from a folder or a hub id, with the class that its config names."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import transformers
from huggingface_hub.errors import HFValidationError
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from specdec.models.hardware import DTYPES
from specdec.models.introspection import device_of
from specdec.utils.parsing import read_by_library
from specdec.utils.paths import require_folder_or_id


def is_block(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a DFlash or DSpark drafter, in any layout."""
    kind = str(config.get("speculators_model_type", ""))
    names = [kind, *(config.get("architectures") or ())]
    return any(word in str(name).lower() for word in ("dflash", "dspark") for name in names) or (
        not kind and config.get("mask_token_id") is not None and config.get("target_layer_ids") is not None
    )


log = logging.getLogger(__name__)


def load(path: str, like: PreTrainedModel | None = None, **placed: Any) -> PreTrainedModel:
    """Load a model in the precision it was saved in; or in another's, and on its device.

    Args:
        placed: what `from_pretrained` is told of where its parts go.
    """
    require_folder_or_id(path)
    log.info("loading %s", path)
    try:
        with read_by_library(path):
            config, _ = PretrainedConfig.get_config_dict(path)
            if is_block(config):
                raise ValueError(f'{path!r} is a block-parallel drafter, no model of its own: pass "dflash:{path}"')
            if "draft_vocab_size" in config or "speculators_model_type" in config:
                raise ValueError(
                    f'{path!r} is an EAGLE head, no model of its own: pass "eagle3:{path}" as the proposer'
                )
            model = _class_of(config).from_pretrained(path, dtype="auto", **placed).eval()
    except (OSError, HFValidationError) as error:
        raise ValueError(
            f"{path} is neither a folder with a model nor a hub repository that can be reached: {error}"
        ) from error
    if like is None:
        return model
    # Of a quantized model the format may be one that nothing else is computed in.
    return model.to(device_of(like), like.dtype if like.dtype in DTYPES.values() else model.dtype)


def _class_of(config: dict[str, Any]) -> Any:
    """Of a model that is to draft: of one with an encoder the class that it was saved as."""
    name = (config.get("architectures") or [""])[0]
    return (
        getattr(transformers, name, AutoModelForCausalLM) if config.get("is_encoder_decoder") else AutoModelForCausalLM
    )
