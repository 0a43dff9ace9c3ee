"""Translation between a `generate()` call of transformers and the loop: transcript, prefill and return value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput
from transformers.generation.utils import GenerateOutput

from specdec.engine.hf.prompt_layout import PromptLayout
from specdec.engine.records import Records
from specdec.engine.transcript import Transcript
from specdec.models.cache.ragged_rows import pads_of_part
from specdec.models.compat import CACHE, pad_token
from specdec.models.encoder import EncoderOutputs, encoder_outputs_of
from specdec.models.exact.prompts import must_read_as_plain, read_as_plain
from specdec.models.introspection import device_of
from specdec.models.output import Output, joined
from specdec.models.positions import counts_positions
from specdec.models.runner import ModelRunner


@dataclass(frozen=True)
class Call:
    """A `generate()` call as transformers has prepared it.

    Attributes:
        input_ids: (B, T) int64, the prompts, or the decoder's start tokens.
        processors: logits processors.
        criteria: stopping criteria.
        config: the generation config.
        streamer: receives the tokens; or None.
        model_kwargs: arguments for the model's forward passes.
        encoder_outputs: encoder outputs, of a model that has an encoder.
        text_kwargs: `model_kwargs` without the encoder's, as for a decoder-only model.
    """

    input_ids: Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    streamer: Any
    model_kwargs: dict[str, Any]
    encoder_outputs: EncoderOutputs | None
    text_kwargs: dict[str, Any]

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        input_ids: Tensor,
        *,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: Any = None,
        inputs_tensor: Tensor | None = None,
        **model_kwargs: Any,
    ) -> Call:
        """The call of a `custom_generate` callable, by the names of its arguments; inputs_tensor: the encoder's."""
        input_ids = input_ids.long()  # as they are after plain decoding's first token
        read = encoder_outputs_of(model, input_ids, inputs_tensor, model_kwargs)
        return cls(input_ids, logits_processor, stopping_criteria, generation_config, streamer, model_kwargs, *read)

    @property
    def samples(self) -> bool:
        """True at T > 0."""
        return bool(self.config.do_sample)


def transcript(call: Call, prompt_layout: PromptLayout, model: PreTrainedModel, positions: int | None) -> Transcript:
    """Make the transcript of a call; `positions` is the number of positions that the model has, None if unlimited."""
    B, config, criteria = len(call.input_ids), call.config, call.criteria
    wanted = config.return_dict_in_generate
    ends_on_tokens = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
    return Transcript(
        prompt=call.input_ids,
        pads=prompt_layout.text_pads,
        order=prompt_layout.text_order,
        criteria=criteria,
        pad_token=pad_token(config) if ends_on_tokens else None,
        streamer=call.streamer,
        max_length=criteria.max_length,
        reach=None if positions is None else _reach(prompt_layout, positions, counts_positions(model)),
        records=Records(
            scores=[[] for _ in range(B)] if wanted and config.output_scores else None,
            logits=[[] for _ in range(B)] if wanted and config.output_logits else None,
            hidden_states=[[] for _ in range(B)] if wanted and config.output_hidden_states else None,
            wanted=prompt_layout.cache is not None,
        ),
    )


def _reach(prompt_layout: PromptLayout, positions: int, padding_counts: bool) -> list[int]:
    """Number of columns that each row can fill; the last one is never read. padding_counts: padding has positions."""
    taken, pads = prompt_layout.real.sum(1, keepdim=True), prompt_layout.pads
    if padding_counts and pads is not None:
        taken = taken + pads
    return (prompt_layout.text + positions + 1 - taken)[:, 0].tolist()


def prefill(target: ModelRunner, call: Call, prompt_layout: PromptLayout, text: Transcript) -> Output:
    """Run the target over the new tokens, in chunks of `prefill_chunk_size` if set; logits (B, 1, V) after the last."""
    embeds = call.text_kwargs.get("inputs_embeds")
    given, pads = prompt_layout.unread((call.input_ids if embeds is None else embeds).to(device_of(target.model)))
    wants_hidden = text.records.hidden_states is not None
    padding = (~prompt_layout.real).sum(1).tolist()
    if must_read_as_plain(target, padding):
        columns = (call.input_ids if embeds is None else embeds).to(target.device)
        output = read_as_plain(target, columns, padding, embedded=embeds is not None, hidden_states=wants_hidden)
        features = None if output.features is None else output.features[:, columns.shape[1] - given.shape[1] :]
        return replace(output, features=features)
    chunk = call.config.prefill_chunk_size
    outputs, start = [], 0
    for part in given.split(given.shape[1] if chunk is None else chunk, 1):
        part_pads = pads_of_part(pads, start, part.shape[1])
        outputs.append(target.extend(part, part_pads, embedded=embeds is not None, hidden_states=wants_hidden))
        start += part.shape[1]
    hidden = outputs[-1].hidden_states  # of the last chunk, as in plain decoding
    if hidden is not None and len(outputs) == 1:
        hidden = tuple(prompt_layout.as_given(states) for states in hidden)
    return replace(joined(outputs), hidden_states=hidden)


def returned(text: Transcript, prompt_layout: PromptLayout, encoder_outputs: EncoderOutputs | None) -> GenerateOutput:
    """Build the output object that transformers' own decoding loops return."""
    recorded = text.records.outputs(text.settled - text.start)
    if encoder_outputs is None:
        return GenerateDecoderOnlyOutput(sequences=text.sequences, **{CACHE: prompt_layout.cache}, **recorded)
    hidden = recorded.pop("hidden_states")
    return GenerateEncoderDecoderOutput(
        sequences=text.sequences,
        **{CACHE: encoder_outputs.together_with(prompt_layout.cache)},
        decoder_hidden_states=hidden,
        encoder_hidden_states=None if hidden is None else encoder_outputs.states.get("hidden_states"),
        **recorded,
    )
