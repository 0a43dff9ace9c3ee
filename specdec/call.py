"""A `generate()` call's ends: the text it starts from, reading what is new of it, and what is returned.

Owns the translation between transformers' arguments and the loop's parts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput
from transformers.generation.utils import GenerateOutput

from specdec.conversation import Conversation
from specdec.rows import pads_of_part
from specdec.runner import ModelRunner, Output, device_of, joined
from specdec.source import Source
from specdec.transcript import Records, Transcript


def transcript(
    input_ids: Tensor,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    streamer: Any,
    conversation: Conversation,
) -> Transcript:
    B = len(input_ids)
    wanted = config.return_dict_in_generate
    ends_on_tokens = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
    pad = config._pad_token_tensor
    return Transcript(
        prompt=input_ids,
        pads=conversation.text_pads,
        order=conversation.text_order,
        criteria=criteria,
        pad_token=int(pad) if ends_on_tokens and pad is not None else None,
        streamer=streamer,
        max_length=criteria.max_length,
        records=Records(
            scores=[[] for _ in range(B)] if wanted and config.output_scores else None,
            logits=[[] for _ in range(B)] if wanted and config.output_logits else None,
            hidden_states=[[] for _ in range(B)] if wanted and config.output_hidden_states else None,
            wanted=conversation.cache is not None,
        ),
    )


def prefill(
    target: ModelRunner,
    input_ids: Tensor,
    conversation: Conversation,
    text: Transcript,
    config: GenerationConfig,
    embeds: Tensor | None,
) -> Output:
    """Read what is new, in chunks of `prefill_chunk_size` if asked; logits (B, 1, V) after it."""
    given, pads = conversation.unread((input_ids if embeds is None else embeds).to(device_of(target.model)))
    wants_hidden = text.records.hidden_states is not None
    chunk = config.prefill_chunk_size or given.shape[1]
    outputs = []
    for start in range(0, given.shape[1], chunk):
        part = given[:, start : start + chunk]
        part_pads = pads_of_part(pads, start, part.shape[1])
        outputs.append(target.extend(part, part_pads, embedded=embeds is not None, hidden_states=wants_hidden))
    hidden = outputs[-1].hidden_states  # of the last chunk, as plain decoding gives them
    if hidden is not None and len(outputs) == 1:
        hidden = tuple(conversation.as_given(states) for states in hidden)
    return replace(joined(outputs), hidden_states=hidden)


def returned(text: Transcript, conversation: Conversation, source: Source | None) -> GenerateOutput:
    """As transformers' own decoding loops return it."""
    recorded = text.recorded()
    if source is None:
        return GenerateDecoderOnlyOutput(sequences=text.sequences, past_key_values=conversation.cache, **recorded)
    hidden = recorded.pop("hidden_states")
    return GenerateEncoderDecoderOutput(
        sequences=text.sequences,
        past_key_values=source.together_with(conversation.cache),
        decoder_hidden_states=hidden,
        encoder_hidden_states=None if hidden is None else source.states.get("hidden_states"),
        **recorded,
    )
