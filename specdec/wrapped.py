"""What a model may come wrapped in: PEFT's adapters, `torch.compile`, or both.

Owns finding the transformers model inside. Knows nothing of what the wrappers do: `generate()` still goes through them.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

LEVELS = ("_orig_mod", "base_model", "model")  # torch.compile's, PEFT's (0.21) and its tuners' way to what they wrap


def bare(model: Any) -> PreTrainedModel:
    """The transformers model that `model` is, or wraps; raises TypeError where there is none."""
    inner = model
    while not isinstance(inner, PreTrainedModel):
        inner = next((getattr(inner, level) for level in LEVELS if _holds(inner, level)), None)
        if inner is None:
            parallel = isinstance(getattr(model, "module", None), PreTrainedModel)  # DistributedDataParallel, FSDP1
            raise TypeError(
                "model must be a transformers PreTrainedModel, or one in PEFT's adapters or torch.compile, got "
                f"{type(model).__name__}" + ("; give its .module" if parallel else "")
            )
    return inner


def require_lm_head(model: PreTrainedModel) -> None:
    """Raises for a model that gives hidden states alone, as `AutoModel` loads them."""
    if not model.can_generate():
        raise ValueError(
            f"{type(model).__name__} has no LM head, so it gives no logits: load the model with AutoModelForCausalLM"
        )


def entrance(model: Any) -> Any:
    """Whose `generate()` to call: the outermost wrapper that has one of its own, else the model inside."""
    outer = getattr(model, "_orig_mod", model)  # torch.compile's only passes on
    return outer if hasattr(type(outer), "generate") else bare(model)


def _holds(model: Any, level: str) -> bool:
    return level in getattr(model, "_modules", {})
