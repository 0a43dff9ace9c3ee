"""Requests that are refused: status, field and message, in the shape of OpenAI's errors. The server goes on."""

import asyncio
import json
import re
from pathlib import Path
from typing import get_type_hints

import pytest

pytest.importorskip("fastapi")
openai = pytest.importorskip("openai")

from openai.types import completion_create_params  # noqa: E402
from openai.types.chat import completion_create_params as chat_create_params  # noqa: E402

from specdec.cli.serving.app import MAX_BODY  # noqa: E402
from specdec.cli.serving.errors import ApiError  # noqa: E402
from specdec.cli.serving.fields import CHAT, COMPLETIONS  # noqa: E402
from specdec.cli.serving.requests import ChatRequest, CompletionRequest, parsed  # noqa: E402
from tests.support.served import ASKED  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
TEXT = {"role": "user", "content": "abc"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
TOOL = {"type": "function", "function": {"name": "f"}}

BAD = [  # fields of a chat, and the name of the one that is wrong
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ({"max_tokens": 10**9}, "max_tokens"),
    ({"max_completion_tokens": 5000}, "max_completion_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": {"role": "user"}}, "messages"),
    ({"messages": [TEXT, "hi"]}, "messages[1]"),
    ({"messages": [{"content": "abc"}]}, "messages[0].role"),
    ({"messages": [{"role": "clown", "content": "abc"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "abc", "tool_call_id": "1"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["abc"]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
    ({"messages": [TEXT | {"tool_calls": [TOOL]}]}, "messages[0].tool_calls"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": "0.5"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"draft_length": -1}, "draft_length"),
    ({"draft_length": 65}, "draft_length"),
    ({"draft_length": True}, "draft_length"),
    ({"rule": "blocks"}, "rule"),
    ({"exact": 1}, "exact"),
    ({"exact": True, "rule": "block"}, "exact"),
    ({"n": 0}, "n"),
    ({"n": 10**6}, "n"),
    ({"n": "2"}, "n"),
    ({"seed": 2**70}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": ""}, "stop[0]"),
    ({"stop": [3]}, "stop[0]"),
    ({"stop": 3}, "stop"),
    ({"frequency_penalty": 3}, "frequency_penalty"),
    ({"presence_penalty": "x"}, "presence_penalty"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"logit_bias": {"1": "x"}}, "logit_bias.1"),
    ({"logit_bias": {"64": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_all": True}}, "stream_options.include_all"),
    ({"model": None}, "model"),
    ({"model": 3}, "model"),
    ({"tools": [TOOL]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "alloy"}}, "audio"),
    ({"prediction": {"type": "content", "content": "abc"}}, "prediction"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"store": True}, "store"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"temprature": 0}, "temprature"),
    ({"prompt": "abc"}, "prompt"),
]
BAD_COMPLETIONS = [
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": 3}, "prompt[0]"),
    ({"prompt": [1, "a"]}, "prompt[0]"),
    ({"prompt": [-1]}, "prompt[0][0]"),
    ({"prompt": [999]}, "prompt"),
    ({"prompt": ["abc"] * 65, "n": 2}, "prompt"),
    ({"messages": ASKED}, "messages"),
    ({"logprobs": 6}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"best_of": 2}, "best_of"),
    ({"echo": True}, "echo"),
    ({"suffix": "x"}, "suffix"),
    ({"max_tokens": 0}, "max_tokens"),
]


def check(served, body, param, path="/v1/chat/completions", status=400):
    found, _, content = served.post(body, path)
    assert found == status, content
    assert {*content} == {"error"}
    error = content["error"]
    assert {*error} == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert (param or "") in error["message"]
    return error


@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda value: str(value)[:40])
def test_bad_chats(served, fields, param):
    check(served, {"model": served.name, "messages": [TEXT]} | fields, param)


@pytest.mark.parametrize(("fields", "param"), BAD_COMPLETIONS, ids=lambda value: str(value)[:40])
def test_bad_completions(served, fields, param):
    check(served, {"model": served.name, "prompt": "abc"} | fields, param, "/v1/completions")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"hello",
        b'{"model": ',
        b"[]",
        b"null",
        b'"text"',
        b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"temperature": NaN}',
        b'{"temperature": Infinity}',
        b'{"seed": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
    ],
    ids=lambda body: repr(body[:30]),
)
def test_bodies_that_are_not_requests(served, body):
    check(served, body, None)


def test_bodies_that_are_too_large(served):
    assert served.post(b" " * (MAX_BODY + 1))[0] == 413


def test_a_number_that_is_too_large():
    with pytest.raises(ApiError, match="temperature"):
        parsed(b'{"model": "m", "messages": [{"role": "user", "content": "a"}], "temperature": 1e999}', ChatRequest)


def test_unknown_models_and_routes(served):
    error = check(served, {"model": "gpt-4o", "messages": [TEXT]}, "model", status=404)
    assert error["code"] == "model_not_found"
    with pytest.raises(openai.NotFoundError, match="The model 'gpt-4o' does not exist"):
        served.client.models.retrieve("gpt-4o")
    for status, found in ((404, served.post({}, "/v1/embeddings")), (405, served.get("/v1/completions"))):
        assert found[0] == status
        assert "Invalid URL" in found[2]["error"]["message"]


def test_the_client_shows_the_message(served):
    with pytest.raises(openai.BadRequestError, match="temperature: Input should be a valid number, got 'hot'") as error:
        served.chat(temperature="hot")
    assert (error.value.param, error.value.type) == ("temperature", "invalid_request_error")


def test_a_template_that_refuses_messages(served):
    reader = served.server._reader._tokenizer
    template = reader.chat_template
    reader.chat_template = "{{ raise_exception('roles must alternate') }}"
    try:
        with pytest.raises(openai.BadRequestError, match="chat template refuses these messages: roles must alternate"):
            served.chat()
        reader.chat_template = None
        with pytest.raises(openai.BadRequestError, match="no chat template: use /v1/completions"):
            served.chat()
    finally:
        reader.chat_template = template


def test_messages_as_the_template_reads_them():
    messages = [{"role": "developer", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}] * 2}]
    messages.append({"role": "assistant", "content": "c", "name": "d", "tool_calls": None})
    request = parsed(json.dumps({"model": "m", "messages": messages}).encode(), ChatRequest)
    assert [message.for_template for message in request.messages] == [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "bb"},
        {"role": "assistant", "content": "c", "name": "d"},
    ]


@pytest.mark.parametrize(
    ("params", "fields", "kind"),
    [
        (chat_create_params, CHAT, ChatRequest),
        (completion_create_params, COMPLETIONS, CompletionRequest),
    ],
    ids=["chat", "completions"],
)
def test_every_field_of_openai_is_listed(params, fields, kind):
    theirs = {*get_type_hints(params.CompletionCreateParamsBase), "stream"}
    assert {*fields} == theirs | {"top_k", "draft_length", "rule", "exact"}
    assert {name for name, field in fields.items() if field.use == "honoured"} == {*kind.model_fields}


def test_the_page_has_the_table_of_the_code():
    """docs/serving.md: a row for each field, with the endpoints that have it."""
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    expected = []
    for name in dict.fromkeys((*CHAT, *COMPLETIONS)):
        uses = {kind: table[name] for kind, table in (("chat", CHAT), ("completions", COMPLETIONS)) if name in table}
        same = len(uses) == 2 and len({*uses.values()}) == 1
        rows = {"both": CHAT[name]} if same else uses
        expected += [f"| `{name}` | {kind} | {field.use} | {field.note} |" for kind, field in rows.items()]
    assert re.findall(r"^\| `\w+` \| (?:both|chat|completions) \|.*$", page, re.M) == expected


def test_a_client_that_leaves_while_it_sends_its_request_is_no_error(served):
    """The log would hold a traceback."""
    parts = iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])
    path, sent = "/v1/chat/completions", []
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [],
    }

    async def receive():
        return next(parts)

    async def send(part):
        sent.append(part.get("status"))

    asyncio.run(served.server._uvicorn.config.app(scope, receive, send))
    assert sent[0] == 499


def test_the_server_goes_on(served):
    assert served.health == {"status": "ok", "queue": 0, "busy": False}
    assert served.chat(temperature=0).choices[0].message.content == served.plain_text()


@pytest.mark.parametrize("depth", [600, 5000])
def test_nested_bodies_are_refused_at_any_depth(depth):
    """Each step of parsing takes another number of Python's frames per level."""
    body = b'{"model": "m", "messages": [' + b"[" * depth + b"]" * depth + b"]}"
    with pytest.raises(ApiError) as caught:
        parsed(body, ChatRequest)
    assert caught.value.status == 400
