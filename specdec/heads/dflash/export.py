"""`save`: writes a DFlash or DSpark drafter in vLLM speculators' layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specdec.heads.dflash.config import DFlashConfig
from specdec.heads.dflash.head import DFlashHead
from specdec.heads.export import among_all, layer_config, refuse_others, speculators_head, write


def save(head: DFlashHead, folder: str | Path, target: str = "") -> None:
    """Write a drafter: config.json and model.safetensors.

    Args:
        target: its name or path, which vLLM wants to know.

    Raises:
        ValueError: what the layout cannot say, or a folder that holds another model's weights.
    """
    c, folder = head.config, Path(folder)
    if not c.own_head or head.d2t is None:
        raise ValueError("this layout wants a drafter with an LM head of its own, this one uses its target's")
    if any(c.windows) and not c.window_from_anchor:
        raise ValueError("this layout's windows count from the anchor, this drafter's from each token")
    refuse_others(folder)
    weights = {name: tensor.contiguous().cpu() for name, tensor in head.state_dict().items()}
    ids = head.draft_to_target
    assert ids is not None
    weights["t2d"] = among_all(ids, c.vocab_size)
    write(folder, described(c, target) | {"torch_dtype": str(head.dtype).removeprefix("torch.")}, weights)


def described(c: DFlashConfig, target: str) -> dict[str, Any]:
    """The config.json."""
    kind = "dflash" if c.markov is None and not c.confidence else "dspark"
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
        "sliding_window_non_causal": not c.causal_windows,
        **({"markov_rank": c.markov_rank, "markov_head_type": c.markov} if c.markov is not None else {}),
        **(
            {"enable_confidence_head": True, "confidence_head_with_markov": c.confidence_with_markov}
            if c.confidence
            else {}
        ),
    }
