"""`read_as_plain`: reads prompts as plain decoding does, in its columns and with its mask and cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

from specdec.models.exact.row_kernels import on_device
from specdec.models.exact.single_steps import has_recurrent_layers
from specdec.models.introspection import forward_parameters, takes_positions
from specdec.models.output import Output
from specdec.models.runner import ModelRunner


def must_read_as_plain(runner: ModelRunner, pads: Sequence[int]) -> bool:
    """Return whether a runner reads prompts with this padding by `read_as_plain`, and not by `extend`."""
    if runner.draft_pass is None:
        return False
    return any(pads) or on_device(runner.model) or has_recurrent_layers(runner.model)


def read_as_plain(
    runner: ModelRunner, given: Tensor, pads: Sequence[int], *, embedded: bool = False, hidden_states: bool = False
) -> Output:
    """Read whole prompts into a runner's empty rows, with padding in the columns where the call has it.

    Args:
        runner: an exact runner.
        given: (B, C) int64 tokens; (B, C, H) embeddings if `embedded`.
        pads: number of padding columns on the left of each row.
        embedded: `given` holds embeddings.
        hidden_states: also return all hidden states.

    Returns:
        Logits (B, 1, V), hidden states and features of all C columns.
    """
    cache = DynamicCache(config=runner.config)
    real = (torch.arange(given.shape[1]) >= torch.tensor(pads)[:, None]).to(given.device)
    inputs = {"attention_mask": real.long(), "use_cache": True, "return_dict": True, runner.cache_argument: cache}
    inputs["inputs_embeds" if embedded else "input_ids"] = given
    if takes_positions(runner.model):
        inputs["position_ids"] = (real.cumsum(1) - 1).clamp(min=0)
    if "logits_to_keep" in forward_parameters(runner.model):
        inputs["logits_to_keep"] = 1
    if hidden_states:
        inputs["output_hidden_states"] = True
    output = runner.read_multimodal(inputs)
    runner.cache.begin_at([given.shape[1] - pad for pad in pads])
    columns = (~real).int().argsort(dim=1, stable=True)  # of each row's tokens, in order
    for index, layer in enumerate(cache.layers):
        runner.cache.states.put_layer(index, layer, runner.cache.lengths)
        if getattr(layer, "keys", None) is not None:
            dropped = given.shape[1] - layer.keys.shape[2]  # columns that have left a sliding window
            runner.cache.put(index, layer.keys, layer.values, columns - dropped)
    assert runner.draft_pass is not None
    runner.draft_pass.pads = list(pads)
    return output
