"""Errors that arise in a client. Errors that the server reports are raised as their classes in ``core.errors``."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from forebay.core import errors, parts
from forebay.core.errors import ForebayError


class ServerUnreachable(ForebayError, ConnectionError):
    """The server did not answer for as long as the client retried."""

    code = "server_unreachable"
    status = 503

    def __init__(self, reason: str) -> None:
        super().__init__(f"the server does not answer: {reason}", hint="check that it is running, and the address")


class SamplesRefused(ForebayError, ValueError):
    """The buffer rejected invalid samples. ``refusals`` lists them, each with its error."""

    code = "samples_refused"
    status = 422

    def __init__(self, refusals: Sequence[tuple[dict[str, Any], ForebayError]]) -> None:
        sample, error = refusals[0]
        more = f" (and {len(refusals) - 1} others)" if len(refusals) > 1 else ""
        message = f"the buffer refused sample {sample.get('uid')!r}{more}: {error.message}"
        super().__init__(message, hint=error.hint, field=error.field)
        self.refusals = list(refusals)


class WriterClosed(ForebayError, RuntimeError):
    """The writer accepts no more samples: it was closed, or it failed for the reason in the message."""

    code = "writer_closed"
    status = 409

    def __init__(self, message: str = "this writer is closed") -> None:
        super().__init__(message, hint="open another writer; a sample that is written twice is stored once")


class ClientClosed(ForebayError, RuntimeError):
    """The client was closed, perhaps by another thread, before or during this call."""

    code = "client_closed"
    status = 409

    def __init__(self) -> None:
        hint = "open another client to continue; batches that were leased are ready for the next reader"
        super().__init__("this client is closed", hint=hint)


def _kinds(base: type[ForebayError] = ForebayError) -> Iterator[type[ForebayError]]:
    yield base
    for kind in base.__subclasses__():
        yield from _kinds(kind)


_BY_CODE = {kind.code: kind for kind in _kinds() if kind.__module__ in (errors.__name__, parts.__name__)}


def make_error(
    code: str, message: str, *, hint: str = "", field: str | None = None, status: int | None = None
) -> ForebayError:
    """The error with this ``code`` and the server's message; a plain ``ForebayError`` if the code is unknown.

    ``status`` is the HTTP status of the server's reply, if there was one.
    """
    kind = _BY_CODE.get(code, ForebayError)
    error = kind.__new__(kind, message)
    ForebayError.__init__(error, message, hint=hint, field=field)  # the class's own __init__ would compose a message
    if status is not None:
        error.__dict__["status_code"] = status
    return error


def error_in(value: Any, status: int | None = None) -> ForebayError | None:
    """The error in ``{"code", "message", "hint", "field"?}``; None if ``value`` has another form."""
    if not isinstance(value, dict) or not isinstance(value.get("message"), str):
        return None
    field = value.get("field")
    return make_error(
        str(value.get("code")),
        value["message"],
        hint=str(value.get("hint") or ""),
        field=field if isinstance(field, str) else None,
        status=status,
    )


def error_of(status: int, body: bytes, asked: str, retry_after_s: float | None = None) -> ForebayError:
    """The error in a reply, or an error that says that the reply is not from a Forebay server."""
    try:
        value = msgspec.json.decode(body)
    except msgspec.DecodeError:
        value = None
    error = error_in(value.get("error"), status) if isinstance(value, dict) else None
    if error is None:
        hint = "check that this is the address of a Forebay server"
        message = f"the reply to {asked} is not from a Forebay server (status {status})"
        error = make_error("", message, hint=hint, status=status)
    if retry_after_s is not None:
        error.__dict__["retry_after_s"] = retry_after_s
    return error
