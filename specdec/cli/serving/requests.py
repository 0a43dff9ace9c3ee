"""Requests: reads the body of a request and checks every value of its fields."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from specdec.cli.serving.errors import invalid
from specdec.cli.serving.fields import CHAT, COMPLETIONS, MAX_CHOICES, MAX_DRAFT, supported
from specdec.data.entries import check_text
from specdec.utils.choices import RuleName

COMPLETION_TOKENS = 16  # OpenAI's default of completions
INT64 = 2**63
Token = Annotated[int, Field(ge=0)]
Stop = Annotated[str, Field(min_length=1)]


class Part(BaseModel):
    """A part of a request: values have exactly the documented types, and no further fields."""

    model_config = ConfigDict(strict=True, extra="forbid")


class StreamOptions(Part):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class Message(Part):
    """A message of a conversation. Parts of text are joined."""

    role: Literal["developer", "system", "user", "assistant"]
    content: str
    name: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _joined(cls, content: Any) -> Any:
        if not isinstance(content, list):
            return content
        texts = []
        for i, part in enumerate(content):
            if not isinstance(part, dict) or part.get("type") != "text":
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise ValueError(f"part {i} is of type {kind!r}, but this server reads only parts of type 'text'")
            if not isinstance(part.get("text"), str) or part.keys() - {"type", "text"}:
                raise ValueError(f"part {i} must have a string 'text', and nothing but 'type' and 'text'")
            texts.append(part["text"])
        return "".join(texts)

    @property
    def for_template(self) -> dict[str, str]:
        """The message as chat templates read it. OpenAI's newer name for the role "system" is unknown to them."""
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": self.content} | ({"name": self.name} if self.name is not None else {})


class Request(Part):
    """Fields that both kinds of requests have."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    seed: int | None = Field(None, ge=-INT64, lt=INT64)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = {}
    stop: list[Stop] = Field([], max_length=4)
    max_tokens: int | None = Field(None, ge=1)
    draft_length: int | None = Field(None, ge=0, le=MAX_DRAFT)
    rule: RuleName | None = None
    exact: bool | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _listed(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop

    @field_validator("logit_bias")
    @classmethod
    def _tokens(cls, bias: dict[str, float]) -> dict[str, float]:
        for token in bias:
            if not (token.isascii() and token.isdecimal() and len(token) < 10):
                raise ValueError(f"the key {token!r} is not a token id, such as '1734'")
        return bias

    @model_validator(mode="after")
    def _together(self) -> Request:
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options is only allowed when stream is true", "stream_options")
        return self

    @property
    def options(self) -> dict[str, Any]:
        """Settings of speculative decoding that the request names, see `SpeculativeGenerator.options`."""
        named = {"draft_length": self.draft_length, "rule": self.rule, "exact": self.exact}
        return {name: value for name, value in named.items() if value is not None}

    @property
    def includes_usage(self) -> bool:
        """True if a stream ends with the counts of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def limit(self) -> int | None:
        """Most tokens of an answer; None: up to the model's limit."""
        return self.max_tokens

    @property
    def limit_name(self) -> str:
        """Name of the field with the limit."""
        return "max_tokens"

    @property
    def alternatives(self) -> int | None:
        """Number of most likely tokens to report for each token of the answer; None: no log probabilities."""
        return None


class ChatRequest(Request):
    """A request to /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @model_validator(mode="after")
    def _limits(self) -> ChatRequest:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise invalid("max_tokens is the old name of max_completion_tokens: give only one of them", "max_tokens")
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs is only allowed when logprobs is true", "top_logprobs")
        return self

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def limit_name(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(Request):
    """A request to /v1/completions. prompts: each a text or token ids."""

    prompt: list[str | list[Token]] = Field(min_length=1)
    max_tokens: int | None = Field(COMPLETION_TOKENS, ge=1)
    logprobs: int | None = Field(None, ge=0, le=5)

    @field_validator("prompt", mode="before")
    @classmethod
    def _prompts(cls, prompt: Any) -> Any:
        several = isinstance(prompt, list) and not (prompt and all(type(token) is int for token in prompt))
        return prompt if several else [prompt]

    @model_validator(mode="after")
    def _choices(self) -> CompletionRequest:
        if len(self.prompt) * self.n > MAX_CHOICES:
            found = f"{len(self.prompt)} prompts with n={self.n}"
            raise invalid(f"{found} are more than {MAX_CHOICES} choices: send several requests", "prompt")
        return self

    @property
    def alternatives(self) -> int | None:
        return self.logprobs


R = TypeVar("R", bound=Request)
FIELDS = {ChatRequest: CHAT, CompletionRequest: COMPLETIONS}


def parsed(body: bytes, kind: type[R]) -> R:
    """Read a request from the body of an HTTP request.

    Raises:
        ApiError: the body is not JSON, or a field is wrong. The message names the field.
    """
    content = _json(body)
    if not isinstance(content, dict):
        raise invalid(f"the body must be a JSON object, got {_short(content)}")
    try:
        return kind.model_validate(supported(content, FIELDS[kind]))
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False)
        found = max(errors, key=lambda each: len(each["loc"]))  # of a union, the alternative that fits best
        name = _name(found["loc"])
        problem = found["msg"].removeprefix("Value error, ")
        given = "" if found["type"] in ("missing", "extra_forbidden") else f", got {_short(found['input'])}"
        raise invalid(f"Invalid value of {name}: {problem}{given}", name) from None


def _json(body: bytes) -> Any:
    try:
        content = json.loads(body.decode(), parse_constant=_not_a_number)
        check_text(content)
        return _without_nulls(content)
    except UnicodeDecodeError as error:
        raise invalid(f"the body is not text in UTF-8: {error}") from None
    except RecursionError:
        raise invalid("the body is nested too deeply") from None
    except ValueError as error:
        raise invalid(f"the body cannot be read as JSON: {error}") from None


def _not_a_number(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _name(place: tuple[int | str, ...]) -> str:
    """Name of a field from its place: "messages[0].role". Names of alternatives of a union are left out."""
    name = ""
    for part in place:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part != "[key]" and "[" not in part and part not in ("str", "list"):
            name += f".{part}" if name else part
    return name


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
