"""`save`: writes a DFlash, JetSpec or DSpark drafter in the layout of vLLM speculators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specdec.heads.dflash.config import DFlashConfig
from specdec.heads.dflash.head import DFlashHead
from specdec.heads.export import check_overwrite, draftable_mask, layer_config, speculators_head, write


def save(head: DFlashHead, folder: str | Path, target: str = "") -> None:
    """Write a drafter's config.json and model.safetensors.

    Args:
        target: name or path of the target, which vLLM reads from the config.

    Raises:
        ValueError: the layout cannot express the drafter, or the folder holds another model.
    """
    c, folder = head.config, Path(folder)
    if not c.own_head or head.d2t is None:
        raise ValueError("this drafter uses its target's LM head, but this layout needs a drafter with its own LM head")
    if any(c.windows) and not c.window_from_anchor:
        raise ValueError("this drafter's windows count from each token, but this layout's count from the anchor")
    if c.kind in ("domino", "dflash2") or c.is_scaled:
        raise ValueError(f"this {c.kind} drafter cannot be written: copy the files that it was loaded from")
    check_overwrite(folder)
    weights = {name: tensor.contiguous().cpu() for name, tensor in head.state_dict().items()}
    ids = head.draft_to_target
    assert ids is not None
    weights["t2d"] = draftable_mask(ids, c.vocab_size)
    write(folder, config_dict(c, target) | {"torch_dtype": str(head.dtype).removeprefix("torch.")}, weights)


def config_dict(c: DFlashConfig, target: str) -> dict[str, Any]:
    """Return the config.json of a drafter."""
    kind = "dflash" if c.markov is None and not c.confidence else "dspark"
    markov = {"markov_rank": c.markov_rank, "markov_head_type": c.markov}
    confidence = {"enable_confidence_head": True, "confidence_head_with_markov": c.confidence_with_markov}
    return {
        "architectures": ["DFlashDraftModel" if kind == "dflash" else "DSparkDraftModel"],
        **speculators_head(kind, c.drafted, target),
        "transformer_layer_config": layer_config(c, c.windows),
        "aux_hidden_state_layer_ids": list(c.tap_ids),
        "block_size": c.block_size,
        "sample_from_anchor": c.from_anchor,
        "mask_token_id": c.mask_token_id,
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": c.target_hidden_size,
        "sliding_window_non_causal": c.causal == "none",
        **({"dflash_config": {"causal": True}} if c.causal == "all" else {}),
        **(markov if c.markov is not None else {}),
        **(confidence if c.confidence else {}),
    }
