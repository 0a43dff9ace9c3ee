"""The routes: /v1/chat/completions, /v1/completions, /v1/models, /health. Errors have the shape of OpenAI's API."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from openai.types import Model
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response as HttpResponse

from specdec.cli.serving import requests
from specdec.cli.serving.answer import Delta, Finish
from specdec.cli.serving.errors import ApiError, hung_up
from specdec.cli.serving.job import Done, Job
from specdec.cli.serving.prompts import PromptReader
from specdec.cli.serving.responses import Response
from specdec.cli.serving.settings import check_bias, check_options, new_tokens
from specdec.cli.serving.worker import Worker
from specdec.models.text_limits import vocab_size

MAX_BODY = 16 * 2**20  # bytes
STREAM = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class Service:
    """Answers requests for one model.

    Args:
        name: the model's name in requests.
        worker: runs the model.
        reader: reads prompts.
        limit: most tokens of a prompt and its answer.
        default_seed: seed of requests that name none; None for random seeds.
    """

    def __init__(self, name: str, worker: Worker, reader: PromptReader, limit: int, default_seed: int | None = None):
        self.name, self.worker, self.limit = name, worker, limit
        self._reader, self._default_seed = reader, default_seed
        self._vocab_size = vocab_size(worker.spec.model)
        self._model = Model(id=name, created=int(time.time()), object="model", owned_by="specdec")

    def app(self) -> FastAPI:
        """Build the application."""
        app = FastAPI(title="specdec", docs_url=None, redoc_url=None, openapi_url=None)
        app.add_api_route("/health", self.health, methods=["GET"])
        app.add_api_route("/v1/models", self.models, methods=["GET"])
        app.add_api_route("/v1/models/{name:path}", self.model, methods=["GET"])
        app.add_api_route("/v1/chat/completions", self.chat_completions, methods=["POST"])
        app.add_api_route("/v1/completions", self.completions, methods=["POST"])
        app.add_exception_handler(ApiError, _failed)
        app.add_exception_handler(HTTPException, _no_route)
        app.add_exception_handler(Exception, _unexpected)
        return app

    async def health(self) -> JSONResponse:
        """Report whether requests are answered, and how many wait."""
        alive = self.worker.is_alive
        state = {"status": "ok" if alive else "stopped", "queue": len(self.worker.queue), "busy": self.worker.is_busy}
        return JSONResponse(state, 200 if alive else 503)

    async def models(self) -> JSONResponse:
        """List the served model."""
        return JSONResponse({"object": "list", "data": [self._model.to_dict()]})

    async def model(self, name: str) -> JSONResponse:
        """Describe the served model."""
        self._check_model(name)
        return JSONResponse(self._model.to_dict())

    async def chat_completions(self, http: Request) -> HttpResponse:
        """Answer a conversation."""
        return await self._answer(http, requests.ChatRequest, "messages")

    async def completions(self, http: Request) -> HttpResponse:
        """Continue texts."""
        return await self._answer(http, requests.CompletionRequest, "prompt")

    async def _answer(self, http: Request, kind: type[requests.Request], prompt_name: str) -> HttpResponse:
        job = await self._job(requests.parsed(await _body(http), kind), _client(http), prompt_name)
        self.worker.submit(job)
        hang_up = asyncio.create_task(self._cancel_at_hang_up(http, job))
        response = Response(job)
        events = self._stream(job, response, await job.next(), hang_up) if job.request.stream else None
        if events is not None:  # an error before the first event has its own status
            return StreamingResponse(events, media_type="text/event-stream", headers=STREAM)
        try:
            return _json(response.whole([event async for event in _events(job)]))
        finally:
            self.worker.cancel(job)  # no effect on a job that is done
            hang_up.cancel()

    async def _job(self, request: requests.Request, client: Any, prompt_name: str) -> Job:
        self._check_model(request.model)
        check_bias(request, self._vocab_size)
        check_options(request, self.worker.spec)
        self.worker.check_room()
        prompts = await self._reader.read(request)
        config = self.worker.spec.model.generation_config
        limits = [new_tokens(request, len(ids), self.limit, config, prompt_name) for ids in prompts]
        return Job(client, request, prompts, limits, self._default_seed if request.seed is None else request.seed)

    async def _stream(
        self, job: Job, response: Response, event: Delta | Finish | Done, hang_up: asyncio.Task[None]
    ) -> AsyncIterator[str]:
        try:
            while not isinstance(event, Done):
                for chunk in response.chunks(event):
                    yield _event(chunk)
                event = await job.next()
            if job.request.includes_usage:
                yield _event(response.last_chunk())
            yield "data: [DONE]\n\n"
        except ApiError as error:
            yield f"data: {JSONResponse(error.body).body.decode()}\n\n"
        finally:
            self.worker.cancel(job)  # no effect on a job that is done
            hang_up.cancel()

    async def _cancel_at_hang_up(self, http: Request, job: Job) -> None:
        """Free the model when the client closes its connection, also while it waits for a whole response."""
        while (await http.receive())["type"] != "http.disconnect":
            pass
        self.worker.cancel(job)
        job.send(hung_up())

    def _check_model(self, name: str) -> None:
        if name != self.name:
            problem = f"The model {name!r} does not exist: this server has {self.name!r}"
            raise ApiError(404, problem, "model", "model_not_found")


async def _events(job: Job) -> AsyncIterator[Delta | Finish]:
    while not isinstance(event := await job.next(), Done):
        yield event


async def _body(http: Request) -> bytes:
    body = bytearray()
    try:
        async for part in http.stream():
            body += part
            if len(body) > MAX_BODY:
                raise ApiError(413, f"the body has more than {MAX_BODY} bytes", code="request_too_large")
    except ClientDisconnect:
        raise hung_up() from None
    return bytes(body)


def _client(http: Request) -> tuple[str, str]:
    """The client whose turn it is: API key and address, since many clients send the same key, such as "none"."""
    return http.headers.get("authorization", ""), http.client.host if http.client else ""


def _json(response: BaseModel, status: int = 200) -> HttpResponse:
    return HttpResponse(response.model_dump_json(exclude_unset=True), status, media_type="application/json")


def _event(chunk: BaseModel) -> str:
    return f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n"


async def _failed(http: Request, error: Any) -> JSONResponse:
    return JSONResponse(error.body, error.status, error.headers)


async def _no_route(http: Request, error: Any) -> JSONResponse:
    problem = f"Invalid URL ({http.method} {http.url.path}): {error.detail}"
    return await _failed(http, ApiError(error.status_code, problem, code="unknown_url"))


async def _unexpected(http: Request, error: Any) -> JSONResponse:
    return await _failed(http, ApiError(500, f"unexpected error, {type(error).__name__}: {error}"))
