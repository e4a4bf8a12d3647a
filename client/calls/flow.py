"""Calls and their repetition, without I/O: flows say what they want of the outside, and are sent what came of it.

A *flow* is a generator that yields a ``Call``, a ``Pause`` or ``Work``. ``transport.py`` has two drivers, one that
blocks and one that awaits; both run the same flows, so that what the client does is written once.
"""

import json
import logging
import math
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import msgspec

from forebay.client.errors import ServerUnreachable, error_of
from forebay.core.backoff import Backoff
from forebay.core.waiting import Deadline

logger = logging.getLogger(__name__)

T = TypeVar("T")
Json: TypeAlias = dict[str, Any]

# 500 is none of them: an error of the server's own code comes again as often as one asks.
TRANSIENT = frozenset({408, 425, 429, 502, 503, 504, 507})
"""Statuses that say: the same request is right a little later."""
LONGEST_RETRY_AFTER_S = 60.0
CALL_TIMEOUT_S = 30.0
PAGE_RUNS = 200
"""Runs that one request for a list of runs asks for."""
ENDLESS_S = math.inf
"""As ``retry_for_s``: asked again for as long as it takes."""
JSON_BODY = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class Call:
    """Send this request. The answer is a ``ServerReply`` or, where none came, ``Lost``."""

    method: str
    path: str
    """Below the transport's address, whatever path that has itself."""
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = CALL_TIMEOUT_S
    """Seconds without a byte from the server. A long poll adds what it asks the server to wait."""
    query: Mapping[str, str | int | float | bool] | None = None

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


@dataclass(frozen=True, slots=True)
class Pause:
    """Do nothing for so many seconds; in the background, if ``is_wakeable``, until woken."""

    seconds: float
    is_wakeable: bool = False


@dataclass(frozen=True, slots=True)
class Work:
    """Compute this where it holds up no event loop. The answer is the result."""

    function: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class ServerReply:
    """What the server answered."""

    status: int
    headers: Mapping[str, str]
    """Their names are found in lower case."""
    body: bytes

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    @property
    def retry_after_s(self) -> float | None:
        """The seconds of Retry-After, at most a minute; None where there is none."""
        text = self.headers.get("retry-after", "")
        return min(float(text), LONGEST_RETRY_AFTER_S) if text.isdecimal() else None


@dataclass(frozen=True, slots=True)
class Lost:
    """No answer came; the server may have acted on the request all the same."""

    reason: str
    retry_after_s = None


Effect: TypeAlias = Call | Pause | Work
Flow: TypeAlias = Generator[Effect, Any, T]
"""Is sent the result of each effect; returns a ``T``."""


def answered(call: Call, retry_for_s: float, transient: Collection[int] = TRANSIENT) -> Flow[ServerReply]:
    """The answer to ``call``, asked again while nobody answers or the server has one of the ``transient`` statuses.

    Raises ``ServerUnreachable``, or what the server said last, ``retry_for_s`` seconds
    after the first failure. A status that is not transient is an answer, whether of success or not.
    """
    pause = Backoff()
    deadline: Deadline | None = None
    while True:
        reply: ServerReply | Lost = yield call
        if isinstance(reply, ServerReply) and reply.status not in transient:
            return reply
        if deadline is None:  # from the first failure on: a long poll may have waited for longer than that before
            deadline = Deadline(retry_for_s)
            _log_repetition(reply, call, retry_for_s)
        if deadline.left_s <= 0:
            raise failure(reply, call)
        yield Pause(min(pause.next_s(reply.retry_after_s), deadline.left_s))


def _log_repetition(reply: ServerReply | Lost, call: Call, retry_for_s: float) -> None:
    """Whoever waits for the call should see why."""
    reason = reply.reason if isinstance(reply, Lost) else f"status {reply.status}"
    limit = "until it is answered" if retry_for_s == ENDLESS_S else f"for up to {retry_for_s:.0f} s"
    logger.warning("%s: %s; trying again %s", call, reason, limit)


def failure(reply: ServerReply | Lost, call: Call) -> Exception:
    """What an answer that is no success means."""
    if isinstance(reply, Lost):
        return ServerUnreachable(reply.reason)
    return error_of(reply.status, reply.body, str(call), reply.retry_after_s)


def decoded(reply: ServerReply | Lost, call: Call) -> Json:
    """The object in a successful reply. Raises what the server said otherwise, or that nobody answers."""
    if isinstance(reply, Lost) or not reply.is_success:
        raise failure(reply, call)
    try:
        value = read_json(reply.body)
    except ValueError:
        value = None
    if not isinstance(value, dict):  # a success of something else that listens there
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

    Raises ``ValueError`` for what is no JSON.
    """
    try:
        return msgspec.json.decode(text)
    except msgspec.ValidationError:  # its decoder refuses such a number, and with it everything around
        return json.loads(bytes(text))
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None
