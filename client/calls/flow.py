"""The protocol without I/O: flows say what they want of the outside, and are sent what came of it.

A *flow* is a generator that yields a ``Call``, a ``Pause`` or ``Work``. ``transport.py`` has two drivers, one that
blocks and one that awaits; both run the same flows, so that what the client does is written once.

Reading what the server tells, numbers beyond float64 included.
"""

import json
import logging
import time
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import msgspec

from forebay.client.errors import ServerUnreachable, error_of
from forebay.core.backoff import Backoff


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


logger = logging.getLogger(__name__)

T = TypeVar("T")
Json: TypeAlias = dict[str, Any]

TRANSIENT = frozenset({408, 425, 429, 502, 503, 504, 507})
"""Statuses that say: the same request is right a little later."""
ENDLESS_S = float("inf")
"""As ``retry_for_s``: tried again for as long as it takes."""
LONGEST_TOLD_S = 60.0
JSON_BODY = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class Call:
    """Send this request. The answer is a ``Reply`` or, where none came, ``Lost``."""

    method: str
    path: str
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 30.0


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
class Reply:
    """What the server answered."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def is_transient(self) -> bool:
        return self.status in TRANSIENT

    @property
    def retry_after_s(self) -> float | None:
        """The seconds of Retry-After, at most a minute; None where there is none."""
        told = self.headers.get("retry-after", "")
        return min(float(told), LONGEST_TOLD_S) if told.isdecimal() else None


@dataclass(frozen=True, slots=True)
class Lost:
    """No answer came; the server may have acted on the request all the same."""

    reason: str
    is_transient = True
    retry_after_s = None


Wish: TypeAlias = Call | Pause | Work
Flow: TypeAlias = Generator[Wish, Any, T]
"""Is sent what came of each wish; returns a ``T``."""


class Patience:
    """Seconds that are used up from the first question on; without a number they never are."""

    def __init__(self, wait_s: float | None) -> None:
        self._until_s = None if wait_s is None else time.monotonic() + wait_s

    @property
    def left_s(self) -> float:
        return float("inf") if self._until_s is None else max(0.0, self._until_s - time.monotonic())


def answered(call: Call, retry_for_s: float, transient: Collection[int] = TRANSIENT) -> Flow[Reply]:
    """The answer to ``call``, asked again while nobody answers or the server says later, as ``transient`` statuses do.

    Raises ``ServerUnreachable``, or what the server said last, ``retry_for_s`` seconds after the first failure.
    """
    pause = Backoff()
    patience: Patience | None = None
    while True:
        told: Reply | Lost = yield call
        if isinstance(told, Reply) and told.status not in transient:
            return told
        if patience is None:
            patience = Patience(retry_for_s)
            tell_trouble(told, call, retry_for_s)
        if patience.left_s <= 0:
            raise failure(told, call)
        yield Pause(min(pause.next_s(told.retry_after_s), patience.left_s))


def tell_trouble(told: Reply | Lost, call: Call, retry_for_s: float) -> None:
    """Log that a call has to be made again: whoever waits for it should see why."""
    what = told.reason if isinstance(told, Lost) else f"status {told.status}"
    limit = "until it is answered" if retry_for_s == ENDLESS_S else f"for up to {retry_for_s:.0f} s"
    logger.warning("%s %s: %s; trying again %s", call.method, call.path, what, limit)


def failure(told: Reply | Lost, call: Call) -> Exception:
    """What an answer that is no success means."""
    if isinstance(told, Lost):
        return ServerUnreachable(told.reason)
    return error_of(told.status, told.body, f"{call.method} {call.path}", told.retry_after_s)


def decoded(reply: Reply, call: Call) -> Json:
    """The object in a successful reply. Raises what the server said otherwise."""
    if reply.status >= 300:
        raise failure(reply, call)
    try:
        value = read_json(reply.body)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise error_of(reply.status, b"", f"{call.method} {call.path}")
    return value


def json_call(method: str, path: str, body: Json | None = None, timeout_s: float = 30.0) -> Call:
    """A call whose body, if any, is JSON."""
    if body is None:
        return Call(method, path, timeout_s=timeout_s)
    return Call(method, path, msgspec.json.encode(body), JSON_BODY, timeout_s)
