"""Arguments of `generate()` for a request, and the limit of its tokens."""

from __future__ import annotations

import sys
from typing import Any

from transformers import GenerationConfig
from transformers.generation.logits_process import SequenceBiasLogitsProcessor

from specdec.cli.serving.errors import invalid, too_long
from specdec.cli.serving.processors import Penalties
from specdec.cli.serving.requests import Request
from specdec.data.conversations import context_of
from specdec.engine.generator import SpeculativeGenerator
from specdec.engine.settings import ONE_ROW

LEAST_TEMPERATURE = 1e-4  # below it, dividing by the temperature may give infinity
WITHOUT_LIMIT = 32_768  # tokens, for a model whose config names no limit


def context_limit(spec: SpeculativeGenerator, given: int | None) -> int:
    """Return the most tokens of a prompt and its answer together.

    It is the smallest of the `given` limit, the config's `max_position_embeddings` and the positions that the model
    was found to have. A tokenizer's `model_max_length` is often wrong, so it is not used.
    """
    known = [context_of(spec.model.config), spec.capability.positions or sys.maxsize]
    limit = min(known)
    limit = WITHOUT_LIMIT if limit == sys.maxsize and given is None else limit
    return min(limit, given or sys.maxsize)


def new_tokens(request: Request, prompt_length: int, limit: int, config: GenerationConfig, param: str) -> int:
    """Return the most tokens of an answer: the request's, else the generation config's, up to the limit.

    Raises:
        ApiError: the prompt, or the prompt with the tokens that the request asks for, exceeds the limit.
    """
    maximum = f"This model's maximum context length is {limit} tokens."
    if prompt_length >= limit:
        raise too_long(f"{maximum} Your prompt has {prompt_length} tokens, which leaves none for an answer.", param)
    if request.limit is None:
        return min(limit - prompt_length, config.max_new_tokens or limit)
    if prompt_length + request.limit > limit:
        asked = f"{prompt_length} tokens in the prompt and {request.limit_name}={request.limit}"
        raise too_long(f"{maximum} You requested {prompt_length + request.limit}: {asked}.", request.limit_name)
    return request.limit


def settings(request: Request, config: GenerationConfig, max_new_tokens: int) -> dict[str, Any]:
    """Return the arguments of `generate()`. Settings that a request does not name are those of the model.

    Args:
        request: the request.
        config: the model's generation config.
        max_new_tokens: most tokens of the answer.
    """
    arguments: dict[str, Any] = ONE_ROW | {"max_new_tokens": max_new_tokens}
    samples = bool(config.do_sample)
    if request.temperature is not None:
        samples = arguments["do_sample"] = request.temperature > 0
    if not samples:
        return arguments
    if request.temperature is not None:
        arguments["temperature"] = max(request.temperature, LEAST_TEMPERATURE)
    if request.top_p is not None:
        arguments["top_p"] = request.top_p
    if request.top_k is not None:
        arguments["top_k"] = request.top_k
    return arguments


def processors(request: Request, prompt_length: int) -> list[Any]:
    """Return the logits processors of a request, in OpenAI's terms: they apply before the temperature."""
    found: list[Any] = []
    if request.logit_bias:
        found.append(SequenceBiasLogitsProcessor({(int(token),): bias for token, bias in request.logit_bias.items()}))
    if request.frequency_penalty or request.presence_penalty:
        found.append(Penalties(prompt_length, request.frequency_penalty, request.presence_penalty))
    return found


def check_bias(request: Request, vocab_size: int) -> None:
    """Raise ApiError for a bias of a token that the model does not have."""
    for token in request.logit_bias:
        if int(token) >= vocab_size:
            raise invalid(f"logit_bias names token {token}, but the model has {vocab_size}", "logit_bias")


def check_options(request: Request, spec: SpeculativeGenerator) -> None:
    """Raise ApiError for settings of speculative decoding that exclude each other or those of the server."""
    try:
        spec.options(**request.options)
    except ValueError as error:
        raise invalid(str(error), next(reversed(request.options))) from None
