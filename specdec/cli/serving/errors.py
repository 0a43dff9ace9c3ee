"""`ApiError`: an error that a client gets, in the shape of OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TYPES = {400: "invalid_request_error", 404: "invalid_request_error", 413: "invalid_request_error"}
TYPES |= {405: "invalid_request_error", 429: "rate_limit_error", 503: "service_unavailable_error"}


class ApiError(Exception):
    """An error with an HTTP status, which the `openai` client raises as its own exception.

    Args:
        status: HTTP status.
        message: one sentence for the user.
        param: name of the request's field that is wrong; None if no single field is.
        code: OpenAI's short name of the error, such as "model_not_found".
        headers: further headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The response, as JSON."""
        kind = TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Make an error of status 400."""
    return ApiError(400, message, param, code)


def too_long(message: str, param: str) -> ApiError:
    """Make the error of a prompt, or of a prompt and an answer, that exceed the model's limit."""
    return ApiError(400, message, param, "context_length_exceeded")


def shutting_down() -> ApiError:
    """Make the error of requests that the server can no longer answer."""
    return ApiError(503, "the server is shutting down", code="shutting_down")


def hung_up() -> ApiError:
    """Make the error of a request whose client is gone. Nobody reads it."""
    return ApiError(499, "the client closed the connection")
