"""Errors in the formats of Anthropic's Messages API and OpenAI's Responses API."""

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


class ProtocolRefused(ValueError):
    """A translation error to return to the agent; ``fields`` are added to the error for its client."""

    def __init__(self, message: str, status: int = 400, **fields: object) -> None:
        super().__init__(message)
        self.status = status
        self.fields = fields


def messages_error(status: int, body: object) -> tuple[int, Fields]:
    """Return the Messages API's error for an engine's ``status`` and ``body`` (JSON or text)."""
    # Other client errors get the type of a 400, other server errors that of a 500.
    other = "invalid_request_error" if status < 500 else "api_error"
    error = {"type": MESSAGES_TYPES.get(status, other), "message": engine_message(body)}
    return status, {"type": "error", "error": error}


def responses_error(status: int, body: object) -> tuple[int, Fields]:
    """Return the Responses API's error for an engine's ``status`` and ``body`` (JSON or text)."""
    # OpenAI uses words as codes; SGLang's own route uses the status.
    kind = RESPONSES_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return status, {"error": {"message": engine_message(body), "type": kind, "param": None, "code": status}}


def engine_message(body: object) -> str:
    """Return the message of an engine's error, in any of the formats that engines use."""
    error = body.get("error", body) if isinstance(body, Mapping) else body
    message = error.get("message") if isinstance(error, Mapping) else error
    return str(message) if message else "the engine gave no reason"


def chunk_status(chunk: Mapping[str, Any]) -> int:
    """Return the status of an error that arrived as a chunk of a stream."""
    code = chunk["error"].get("code") if isinstance(chunk["error"], Mapping) else None
    return code if isinstance(code, int) and code >= 400 else 500
