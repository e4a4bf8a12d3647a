"""Limits on what one client may use of a server, before and while it sends a request, and the errors beyond them.

Server, gateway and engines have the same limits. One timer checks all connections of a server, whatever their traffic,
and limits their number, so that descriptors are left for the files that the server must open.
"""

import asyncio
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import islice
from operator import attrgetter
from typing import NamedTuple, Protocol, Self

from forebay.core.errors import ForebayError

INTERVAL_S = 1.0
LINGER_S = 2.0
"""Time for a refused client to read the reason: if it is cut off while it sends, it cannot read the reply."""

STANDSTILL_S = 1.0
"""How long a request or a reply may be stalled once the server is shutting down."""
END_S = 5.0
"""After this, requests still under way are ended, before uvicorn does so with a traceback."""
NUM_WEIGHED = 64
"""Idle connections considered for closing if there are too many: checking all would slow down each new one."""


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of one connection; the server closes a connection that exceeds them.

    The server's settings have the same names and defaults.
    """

    max_head_bytes: int = 64 << 10
    """Maximum bytes of the first line and the headers of a request."""
    head_timeout_s: float = 10.0
    """Seconds from a request's first byte to the end of its headers."""
    body_timeout_s: float = 30.0
    """Seconds that a body may be stalled while the server reads it."""
    idle_timeout_s: float = 75.0
    """Seconds without a request under way, including a new connection that never sent a byte, or with a reply of which
    the client reads nothing."""

    @classmethod
    def of(cls, settings: object) -> Self:
        """The limits of the server's settings, or of any object with these attributes."""
        return cls(**{each.name: getattr(settings, each.name) for each in fields(cls)})


DEFAULT_LIMITS = ConnectionLimits()


class RequestStalled(ForebayError):
    """A client began a request, then sent nothing for too long; the connection is closed."""

    code = "request_stalled"
    status = 408

    def __init__(self, what: str, setting: str) -> None:
        super().__init__(what, hint=f"send it without a pause, or raise the server's setting {setting}")


class HeadTooLarge(ForebayError):
    """The first line and the headers of a request exceed the limit; the connection is closed."""

    code = "head_too_large"
    status = 431

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(
            f"the first line and the headers are larger than {limit_bytes} bytes",
            hint="send shorter headers, or raise the server's setting max_head_bytes",
        )


class SweptConnection(Protocol):
    """What the sweep needs from a connection."""

    loop: asyncio.AbstractEventLoop
    has_sent_body: bool
    """Whether the body of any of its requests was read; keys are checked before that."""
    reply_patience_s: Callable[[float], float] | None
    """Maps seconds that the reply has stalled to seconds that it still may; None for the usual limit."""

    @property
    def waits_for(self) -> str:
        """What the server is waiting for.

        The rest of a ``head`` or of a ``body``, the next request (``idle``), the client to ``take`` more of a
        reply or its last part before the connection closes, or the client to ``end`` the connection after a
        refusal; empty if it waits for nothing.
        """

    @property
    def progress(self) -> int:
        """A number that changes as long as the client makes progress."""

    def end_wait(self, waited_for: str) -> None:
        """End the wait: the client took too long."""


class _Standing(NamedTuple):
    """What a connection was waiting for, its progress, and since when."""

    waits_for: str
    progress: int
    since_s: float


def _is_idle(connection: SweptConnection) -> bool:
    """Whether no request is under way; a refused one whose body is not read does not count."""
    waits_for = connection.waits_for
    return waits_for in ("idle", "head", "end") or (waits_for == "body" and not connection.has_sent_body)


class ConnectionSweep:
    """Checks all connections of a server about once a second, or more often for shorter limits."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._bounds_s = {
            "head": limits.head_timeout_s,
            "body": limits.body_timeout_s,
            "idle": limits.idle_timeout_s,
            "take": limits.idle_timeout_s,
            "end": LINGER_S,
        }
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        # The journal, engines and run processes need the other half of the descriptors.
        self._most = sys.maxsize if limit == resource.RLIM_INFINITY else limit // 2
        self._interval_s = min(INTERVAL_S, *(bound / 4 for bound in self._bounds_s.values()))
        self._seen: dict[SweptConnection, _Standing | None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._ends_at_s: float | None = None

    def add(self, connection: SweptConnection) -> None:
        """Watch a connection. If there are too many, the oldest idle one is closed, or this one.

        Connections that never sent a body are closed first.
        """
        if len(self._seen) >= self._most:
            idle = filter(_is_idle, self._seen)
            min(islice(idle, NUM_WEIGHED), key=attrgetter("has_sent_body"), default=connection).end_wait("take")
        self._seen[connection] = None
        if self._timer is None:
            self._timer = connection.loop.call_later(self._interval_s, self._sweep, connection.loop)

    def discard(self, connection: SweptConnection) -> None:
        """Stop watching a connection that has ended."""
        self._seen.pop(connection, None)

    def end(self, loop: asyncio.AbstractEventLoop) -> None:
        """Break off stalled requests as the server shuts down, and finally all that are still under way."""
        self._bounds_s = dict.fromkeys(self._bounds_s, STANDSTILL_S)
        self._interval_s = STANDSTILL_S / 4
        self._ends_at_s = loop.time() + END_S
        if self._timer is not None:
            self._timer.cancel()
            self._sweep(loop)

    def _left_s(self, connection: SweptConnection, waits_for: str, stood_s: float) -> float:
        patience_s = connection.reply_patience_s
        if waits_for == "take" and patience_s is not None and self._ends_at_s is None:
            return patience_s(stood_s)
        return self._bounds_s[waits_for] - stood_s

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        now_s, is_ending = loop.time(), self._ends_at_s is not None
        is_over = self._ends_at_s is not None and now_s >= self._ends_at_s
        for connection, before in list(self._seen.items()):
            waits_for, progress = connection.waits_for, connection.progress
            if is_over:
                connection.end_wait("take")
            elif before is None or before[:2] != (waits_for, progress):
                self._seen[connection] = _Standing(waits_for, progress, now_s)
            elif waits_for and self._left_s(connection, waits_for, now_s - before.since_s) <= 0:
                connection.end_wait("take" if is_ending else waits_for)  # during shutdown, without a reply
        self._timer = loop.call_later(self._interval_s, self._sweep, loop) if self._seen else None
