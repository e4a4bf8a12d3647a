"""What can go wrong at a client, besides what the server says: that is raised as the class of ``core.errors``."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from forebay.core import errors
from forebay.core.errors import ForebayError


class ServerUnreachable(ForebayError, ConnectionError):
    """Nobody answered at the server's address for as long as the client tried."""

    code = "server_unreachable"
    status = 503

    def __init__(self, reason: str) -> None:
        super().__init__(f"the server does not answer: {reason}", hint="is it running, and is the address right?")


class SamplesRefused(ForebayError, ValueError):
    """The buffer will not take some samples, as they are wrong. ``refusals`` are they, each with what is wrong."""

    code = "samples_refused"
    status = 422

    def __init__(self, refusals: Sequence[tuple[dict[str, Any], ForebayError]]) -> None:
        sample, error = refusals[0]
        more = f" (and {len(refusals) - 1} others)" if len(refusals) > 1 else ""
        message = f"the buffer refused sample {sample.get('uid')!r}{more}: {error.message}"
        super().__init__(message, hint=error.hint, field=error.field)
        self.refusals = list(refusals)


class WriterClosed(ForebayError, RuntimeError):
    """The writer takes nothing more: it was closed, or it has failed and says why."""

    code = "writer_closed"
    status = 409

    def __init__(self, message: str = "this writer is closed") -> None:
        super().__init__(message, hint="open another one; a sample that is written twice is stored once")


class ClientClosed(ForebayError, RuntimeError):
    """The client was left, perhaps by another thread, while this call was under way or before it."""

    code = "client_closed"
    status = 409

    def __init__(self) -> None:
        hint = "what was leased is ready for the next reader; open another client to go on"
        super().__init__("this client is closed", hint=hint)


def _kinds(base: type[ForebayError] = ForebayError) -> Iterator[type[ForebayError]]:
    yield base
    for kind in base.__subclasses__():
        yield from _kinds(kind)


_BY_CODE = {kind.code: kind for kind in _kinds() if kind.__module__ == errors.__name__}


def make_error(
    code: str, message: str, *, hint: str = "", field: str | None = None, status: int | None = None
) -> ForebayError:
    """The error that ``code`` stands for, with the words of the server; a ``ForebayError`` if the code is unknown.

    ``status_code`` is the status that the server answered with, if it did.
    """
    kind = _BY_CODE.get(code, ForebayError)
    error = kind.__new__(kind, message)
    ForebayError.__init__(error, message, hint=hint, field=field)  # the words are there: the kind need not find them
    if status is not None:
        error.__dict__["status_code"] = status
    return error


def error_in(value: Any, status: int | None = None) -> ForebayError | None:
    """The error in ``{"code", "message", "hint", "field"?}``; None if that is not what ``value`` is."""
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
    """The error that a reply tells of; one that says so if the reply is not Forebay's."""
    try:
        value = msgspec.json.decode(body)
    except msgspec.DecodeError:
        value = None
    error = error_in(value.get("error"), status) if isinstance(value, dict) else None
    if error is None:
        hint = "is this the address of a Forebay server?"
        error = make_error("", f"the answer to {asked} is not Forebay's (status {status})", hint=hint, status=status)
    if retry_after_s is not None:
        error.__dict__["retry_after_s"] = retry_after_s
    return error
