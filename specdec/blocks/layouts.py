"""`save`: writes a DFlash or DSpark drafter in vLLM speculators' layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from specdec.blocks.config import DFlashConfig
from specdec.blocks.head import DFlashHead
from specdec.eagle3.layouts import layer_config, refuse_others, write


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
    weights["t2d"] = torch.zeros(c.vocab_size, dtype=torch.bool)
    ids = head.draft_to_target
    assert ids is not None
    weights["t2d"][ids.cpu()] = True
    write(folder, described(c, target) | {"torch_dtype": str(head.dtype).removeprefix("torch.")}, weights)


def described(c: DFlashConfig, target: str) -> dict[str, Any]:
    """The config.json."""
    kind = "dflash" if c.markov is None and not c.confidence else "dspark"
    layer = layer_config(c) | {"num_hidden_layers": c.num_layers}
    windows = [window for window in c.windows if window is not None]
    if windows:
        layer |= {
            "sliding_window": windows[0],
            "use_sliding_window": True,
            "layer_types": ["full_attention" if window is None else "sliding_attention" for window in c.windows],
        }
    return {
        "architectures": ["DFlashDraftModel" if kind == "dflash" else "DSparkDraftModel"],
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": c.drafted,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": target, "architectures": []},
        },
        "transformer_layer_config": layer,
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
