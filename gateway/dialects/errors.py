"""Errors as Anthropic's Messages API and OpenAI's Responses API word them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from forebay.gateway.dialects.history import Fields

MESSAGES_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
RESPONSES_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ProtocolRefused(ValueError, ABC):
    """What a translation raises for a call that gets an error: ``status`` and ``body`` are the reply."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status

    @property
    @abstractmethod
    def body(self) -> Fields:
        """The body to answer."""


class MessagesRefused(ProtocolRefused):
    """An error of the Messages API. ``details`` are for clients that act on them."""

    def __init__(self, message: str, status: int = 400, *, details: Fields | None = None) -> None:
        super().__init__(message, status)
        self._details = details

    @property
    def body(self) -> Fields:
        body = _messages_body(self.status, str(self))
        if self._details:
            body["error"]["details"] = self._details
        return body


class ResponsesRefused(ProtocolRefused):
    """An error of the Responses API. ``param`` is the field that is wrong."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400) -> None:
        super().__init__(message, status)
        self.param = param

    @property
    def body(self) -> Fields:
        return _responses_body(self.status, str(self), self.param)


def messages_error(status: int, body: object) -> tuple[int, Fields]:
    """The reply of the Messages API where the engine answered ``status`` with ``body`` (its JSON, or its text)."""
    return status, _messages_body(status, engine_message(body))


def responses_error(status: int, body: object) -> tuple[int, Fields]:
    """The same of the Responses API."""
    return status, _responses_body(status, engine_message(body), None)


def _messages_body(status: int, message: str) -> Fields:
    # Other client errors are of the type of a 400, other server errors of a 500.
    other = "invalid_request_error" if status < 500 else "api_error"
    return {"type": "error", "error": {"type": MESSAGES_TYPES.get(status, other), "message": message}}


def _responses_body(status: int, message: str, param: str | None) -> Fields:
    # OpenAI has words for codes; SGLang's own route has the status there.
    kind = RESPONSES_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def engine_message(body: object) -> str:
    """The message of an engine's error, in any of the shapes that engines use."""
    error = body.get("error", body) if isinstance(body, Mapping) else body
    message = error.get("message") if isinstance(error, Mapping) else error
    return str(message) if message else "the engine gave no reason"


def chunk_status(chunk: Mapping[str, Any]) -> int:
    """The status of an error that came as a chunk of a stream."""
    code = chunk["error"].get("code") if isinstance(chunk["error"], Mapping) else None
    return code if isinstance(code, int) and code >= 400 else 500
