"""Errors as OpenAI's Responses API words them, with the status as the code, as SGLang does."""

from forebay.gateway.dialects.history import Fields, told_error

TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ResponsesRefused(ValueError):
    """A call of the Responses API that gets an error: ``status`` and ``body`` are the reply."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.status = status
        self.param = param

    @property
    def body(self) -> Fields:
        """The body to answer."""
        return error_body(self.status, str(self), self.param)


def error(status: int, body: object) -> tuple[int, Fields]:
    """The reply to a call for which the engine answered ``status`` with ``body`` (its JSON, or its text)."""
    return status, error_body(status, told_error(body))


def error_body(status: int, message: str, param: str | None = None) -> Fields:
    """The body of an error."""
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}
