"""Fields of OpenAI's requests, and what the server does with each. docs/serving.md shows these tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from specdec.cli.serving.errors import invalid

MAX_CHOICES = 128  # choices of one request
MAX_DRAFT = 64  # draft tokens per round


@dataclass(frozen=True)
class Field:
    """A field of a request.

    Attributes:
        use: "honoured"; "no effect" on the answer, by OpenAI's definition; or "refused" with status 400.
        note: explanation, in Markdown.
        harmless: values of a refused field that are accepted, since they ask for nothing.
    """

    use: Literal["honoured", "no effect", "refused"]
    note: str
    harmless: tuple[Any, ...] = ()


def honoured(note: str) -> Field:
    """Describe a field that has its effect."""
    return Field("honoured", note)


def refused(*harmless: Any) -> Field:
    """Describe a field that is refused, unless its value is one of these."""
    values = " or ".join(f"`{value!r}`" for value in harmless)
    return Field("refused", f"except {values}" if harmless else "", harmless)


TAG = Field("no effect", "a label or a hint")
SHARED = {
    "model": honoured("the model's name, as `/v1/models` lists it; any other: 404"),
    "stream": honoured("server-sent events"),
    "stream_options": honoured("`include_usage`; only with `stream`"),
    "n": honoured(f"1 to {MAX_CHOICES}: choice i is generated with seed + i, one after the other"),
    "seed": honoured(
        "in float32, the text is that of `generate()` after `torch.manual_seed(seed)`. Default: `--seed`, else random"
    ),
    "temperature": honoured("0 to 2: 0 is greedy. Default: the model's generation config"),
    "top_p": honoured("0 to 1, where the model samples"),
    "top_k": honoured("not OpenAI's: the tokens that are sampled from, 0: all. Default: the model's generation config"),
    "frequency_penalty": honoured("-2 to 2, for each time that the answer has the token"),
    "presence_penalty": honoured("-2 to 2, if the answer has the token"),
    "logit_bias": honoured("token ids to numbers from -100 to 100"),
    "stop": honoured("a string or up to 4; the text ends before it"),
    "draft_length": honoured(f"not OpenAI's: 0 to {MAX_DRAFT}, draft tokens per round. Default: `--draft-length`"),
    "rule": honoured("not OpenAI's: the verification rule of a request that samples. Default: `--rule`"),
    "exact": honoured("not OpenAI's: the text of plain decoding in half precision, too. Default: `--exact`"),
    "user": TAG,
}
CHAT = SHARED | {
    "messages": honoured("roles developer, system, user and assistant; text only"),
    "max_completion_tokens": honoured("at least 1. Default: up to the model's limit"),
    "max_tokens": honoured("the same, by its old name"),
    "logprobs": honoured("also when streaming; see [below](#log-probabilities)"),
    "top_logprobs": honoured("0 to 20; needs `logprobs`"),
    "metadata": refused({}),
    "store": refused(False),
    "safety_identifier": TAG,
    "prompt_cache_key": TAG,
    "prompt_cache_options": TAG,
    "prompt_cache_retention": TAG,
    "parallel_tool_calls": Field("no effect", "there are no tools"),
    "service_tier": refused("auto", "default"),
    "audio": refused(),
    "function_call": refused("none", "auto"),
    "functions": refused([]),
    "modalities": refused(["text"]),
    "moderation": refused(),
    "prediction": refused(),
    "reasoning_effort": refused("none"),
    "response_format": refused({"type": "text"}),
    "tool_choice": refused("none", "auto"),
    "tools": refused([]),
    "verbosity": refused("medium"),
    "web_search_options": refused(),
}
COMPLETIONS = SHARED | {
    "prompt": honoured("a string, token ids, or a list of these"),
    "max_tokens": honoured("at least 1. Default: 16, as OpenAI's"),
    "logprobs": honoured("0 to 5, also when streaming; see [below](#log-probabilities)"),
    "best_of": refused(1),
    "echo": refused(False),
    "suffix": refused(""),
}


def supported(body: dict[str, Any], fields: dict[str, Field]) -> dict[str, Any]:
    """Return the fields of a request that are honoured. A null counts as absent.

    Raises:
        ApiError: a field that is unknown, or refused.
    """
    kept = {}
    for name, value in body.items():
        if value is None:
            continue
        field = fields.get(name)
        if field is None:
            raise invalid(f"Unrecognized request argument supplied: {name}", name, "unknown_parameter")
        if field.use == "refused" and not any(_same(value, harmless) for harmless in field.harmless):
            accepted = "".join(f", except {value!r}" for value in field.harmless)
            raise invalid(f"{name} is not supported by this server{accepted}", name, "unsupported_parameter")
        if field.use == "honoured":
            kept[name] = value
    return kept


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and value == other
