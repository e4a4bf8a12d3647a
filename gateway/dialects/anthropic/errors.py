"""Errors as Anthropic's Messages API words them."""

from forebay.gateway.dialects.history import Fields, told_error

TYPES = {
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


class MessagesRefused(ValueError):
    """A call of the Messages API that gets an error: ``status`` and ``body`` are the reply."""

    def __init__(self, message: str, status: int = 400, *, details: Fields | None = None) -> None:
        super().__init__(message)
        self.status = status
        self._details = details

    @property
    def body(self) -> Fields:
        """The body to answer."""
        body = error_body(self.status, str(self))
        if self._details:
            body["error"]["details"] = self._details
        return body


def error(status: int, body: object) -> tuple[int, Fields]:
    """The reply to a call for which the engine answered ``status`` with ``body`` (its JSON, or its text)."""
    return status, error_body(status, told_error(body))


def error_body(status: int, message: str) -> Fields:
    """The body of an error; other client errors are of the type of a 400, other server errors of a 500."""
    other = "invalid_request_error" if status < 500 else "api_error"
    return {"type": "error", "error": {"type": TYPES.get(status, other), "message": message}}
