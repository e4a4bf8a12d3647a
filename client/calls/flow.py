"""Calls and retries, without I/O.

A *flow* is a generator that yields a ``Call``, a ``Pause`` or ``Work`` and is sent the result. ``transport.py`` has a
blocking and an awaited driver. Both run the same flows, so that the client's behaviour is written once.
"""

import json
import logging
import math
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import msgspec

from forebay.client.errors import ServerUnreachable, error_of
from forebay.core.backoff import Backoff, Deadline

logger = logging.getLogger(__name__)

T = TypeVar("T")
Json: TypeAlias = dict[str, Any]

# 500 is not among them: an error in the server's own code recurs at each retry.
TRANSIENT = frozenset({408, 425, 429, 502, 503, 504, 507})
"""Statuses after which the same request may succeed a little later."""
LONGEST_RETRY_AFTER_S = 60.0
CALL_TIMEOUT_S = 30.0
RETRY_FOR_S = 120.0
"""Default for retrying the calls of clients."""
PAGE_RUNS = 200
"""Runs per page when listing runs."""
ENDLESS_S = math.inf
"""A ``retry_for_s`` without a limit."""
JSON_BODY = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class Call:
    """A request. Its result is a ``ServerReply`` or, if no reply came, ``Lost``."""

    method: str
    path: str
    """Relative to the transport's address, which may have a path itself."""
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = CALL_TIMEOUT_S
    """Longest time without a byte from the server, in seconds. A long poll adds the time that the server may wait."""
    query: Mapping[str, str | int | float | bool] | None = None

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


@dataclass(frozen=True, slots=True)
class Pause:
    """A pause of ``seconds``; in the background, ``wake`` ends it early if ``is_wakeable``."""

    seconds: float
    is_wakeable: bool = False


@dataclass(frozen=True, slots=True)
class Work:
    """A computation that must not block an event loop. Its result is the function's."""

    function: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class ServerReply:
    """A reply of the server, of any status."""

    status: int
    headers: Mapping[str, str]
    """Looked up by lower-case names."""
    body: bytes

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    @property
    def retry_after_s(self) -> float | None:
        """Seconds in the Retry-After header, at most 60; None without one."""
        text = self.headers.get("retry-after", "")
        return min(float(text), LONGEST_RETRY_AFTER_S) if text.isdecimal() else None


@dataclass(frozen=True, slots=True)
class Lost:
    """No reply came; the server may still have acted on the request."""

    reason: str
    retry_after_s = None


Effect: TypeAlias = Call | Pause | Work
Flow: TypeAlias = Generator[Effect, Any, T]
"""A generator that is sent the result of each effect and returns a ``T``."""


def answered(call: Call, retry_for_s: float, transient: Collection[int] = TRANSIENT) -> Flow[ServerReply]:
    """Make ``call`` and return the reply, retrying while the server is unreachable or its status is ``transient``.

    Returns any other status, successful or not. Raises ``ServerUnreachable``, or the server's last error,
    ``retry_for_s`` seconds after the first failure.
    """
    pause = Backoff()
    deadline: Deadline | None = None
    while True:
        reply: ServerReply | Lost = yield call
        if isinstance(reply, ServerReply) and reply.status not in transient:
            return reply
        if deadline is None:  # counted from the first failure: a long poll may have waited longer than that before
            deadline = Deadline(retry_for_s)
            _log_repetition(reply, call, retry_for_s)
        if deadline.left_s <= 0:
            raise failure(reply, call)
        yield Pause(min(pause.next_s(reply.retry_after_s), deadline.left_s))


def _log_repetition(reply: ServerReply | Lost, call: Call, retry_for_s: float) -> None:
    reason = reply.reason if isinstance(reply, Lost) else f"status {reply.status}"
    limit = "until the server replies" if retry_for_s == ENDLESS_S else f"for up to {retry_for_s:.0f} s"
    logger.warning("%s: %s; retrying %s", call, reason, limit)


def failure(reply: ServerReply | Lost, call: Call) -> Exception:
    """The error for a result that is not a success."""
    if isinstance(reply, Lost):
        return ServerUnreachable(reply.reason)
    return error_of(reply.status, reply.body, str(call), reply.retry_after_s)


def decoded(reply: ServerReply | Lost, call: Call) -> Json:
    """The JSON object in a successful reply. Raises the server's error, or ``ServerUnreachable``."""
    if isinstance(reply, Lost) or not reply.is_success:
        raise failure(reply, call)
    try:
        value = read_json(reply.body)
    except ValueError:
        value = None
    if not isinstance(value, dict):  # a success, but of a server that is not Forebay
        raise error_of(reply.status, b"", str(call))
    return value


def json_call(
    method: str, path: str, body: Json | msgspec.Struct | None = None, timeout_s: float = CALL_TIMEOUT_S
) -> Call:
    """A call whose body, if any, is JSON."""
    if body is None:
        return Call(method, path, timeout_s=timeout_s)
    return Call(method, path, msgspec.json.encode(body), JSON_BODY, timeout_s)


def read_json(text: bytes | memoryview) -> Any:
    """The value in ``text``. A number too large for a float, which a sample may hold, becomes infinite.

    Raises ``ValueError`` if ``text`` is not JSON.
    """
    try:
        return msgspec.json.decode(text)
    except msgspec.ValidationError:  # msgspec rejects the whole text because of such a number
        return json.loads(bytes(text))
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None
