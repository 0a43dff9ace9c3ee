"""A `generate()` call's beginning and end: the text it starts from, reading the prompts, what it gives back.

Owns the translation between transformers' arguments and the loop's parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, StoppingCriteriaList

from specdec.runner import ModelRunner, Output, device_of
from specdec.transcript import Records, Transcript


def transcript(
    input_ids: Tensor,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    streamer: Any,
    model_kwargs: dict[str, Any],
) -> Transcript:
    B = len(input_ids)
    wanted = config.return_dict_in_generate
    ends_on_tokens = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
    pad = config._pad_token_tensor
    return Transcript(
        prompt=input_ids,
        pads=_pads(input_ids, model_kwargs) if input_ids.shape[1] else [0] * B,
        criteria=criteria,
        pad_token=int(pad) if ends_on_tokens and pad is not None else None,
        streamer=streamer,
        max_length=criteria.max_length,
        records=Records(
            scores=[[] for _ in range(B)] if wanted and config.output_scores else None,
            logits=[[] for _ in range(B)] if wanted and config.output_logits else None,
            hidden_states=[[] for _ in range(B)] if wanted and config.output_hidden_states else None,
            wanted=bool(wanted),
        ),
    )


def prefill(
    target: ModelRunner, input_ids: Tensor, text: Transcript, config: GenerationConfig, model_kwargs: dict[str, Any]
) -> Output:
    """Run the prompts, in chunks of `prefill_chunk_size` if asked; logits (B, 1, V) after them."""
    embeds = model_kwargs.get("inputs_embeds")
    given = input_ids if embeds is None else embeds
    device = device_of(target.model)
    given, pads = given.to(device), _pads(given, model_kwargs)
    wants_hidden = text.records.hidden_states is not None
    chunk = config.prefill_chunk_size or given.shape[1]
    features: list[Tensor | None] = []
    for start in range(0, given.shape[1], chunk):
        part = given[:, start : start + chunk]
        part_pads = [min(max(pad - start, 0), part.shape[1]) for pad in pads]
        output = target.extend(
            part if embeds is None else None,
            part_pads,
            embeds=part if embeds is not None else None,
            hidden_states=wants_hidden,
        )
        features.append(output.features)
    if output.features is None:
        return output
    return replace(output, features=torch.cat([part for part in features if part is not None], 1))


def as_dynamic_cache(target: ModelRunner, text: Transcript, base: Sequence[int]) -> DynamicCache:
    """The settled text's keys and values as `generate()` returns them: left padding included, last token not."""
    cache = DynamicCache(config=target.config)
    new = text.settled - text.start - 1
    longest = max(base) + 1 + new
    for index in range(len(target.cache)):
        try:
            keys, values = target.cache.layer(index)
        except IndexError:
            continue
        column = torch.arange(longest, device=keys.device)
        shift = torch.tensor([longest - (b + 1 + new) for b in base], device=keys.device)[:, None]
        slot = (column - shift).clamp(0, keys.shape[2] - 1)[:, None, :, None]
        cache.update(*(t.gather(2, slot.expand(-1, t.shape[1], -1, t.shape[3])) for t in (keys, values)), index)
    return cache


def _pads(given: Tensor, model_kwargs: dict[str, Any]) -> list[int]:
    """Left padding of each row, from the attention mask (None: no padding)."""
    mask = model_kwargs.get("attention_mask")
    return [0] * len(given) if mask is None else (mask == 0).sum(1).tolist()
