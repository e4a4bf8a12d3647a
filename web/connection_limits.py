"""What one client may take of a server, before and while it sends a request, and what it is told beyond that.

The bounds are the same for server, gateway and engines. One timer looks at all connections of a server, however many
packets they send, and bounds their number as well: the files that a server must open have descriptors left.
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
"""A client that was refused has so long to read why: one that is cut off while it sends would find nothing to read."""

STANDSTILL_S = 1.0
"""How long a request or a reply may stand still once the server is ending."""
END_S = 5.0
"""After this, whatever is still under way is ended, before uvicorn does it with a traceback."""
NUM_WEIGHED = 64
"""Idle connections of which one is closed where there are too many: to look at all would slow each new one down."""


@dataclass(frozen=True)
class ConnectionLimits:
    """The bounds of one connection; a server closes what goes beyond them.

    The server's settings have the same names, and these defaults.
    """

    max_head_bytes: int = 64 << 10
    """Bytes of the first line and the headers of a request."""
    head_timeout_s: float = 10.0
    """Seconds from a request's first byte to the end of its headers."""
    body_timeout_s: float = 30.0
    """Seconds that a body may stand still while the server reads it."""
    idle_timeout_s: float = 75.0
    """Seconds without a request under way, from the first one on also where no byte ever came, or with a reply of which
    the client takes nothing."""

    @classmethod
    def of(cls, settings: object) -> Self:
        """Those of the server's settings, or of anything else that has them as attributes."""
        return cls(**{each.name: getattr(settings, each.name) for each in fields(cls)})


DEFAULT_LIMITS = ConnectionLimits()


class RequestStalled(ForebayError):
    """A client began a request, and then sent nothing of it for too long; the connection is closed."""

    code = "request_stalled"
    status = 408

    def __init__(self, what: str, setting: str) -> None:
        super().__init__(what, hint=f"send it without a pause, or raise {setting} of the server")


class HeadTooLarge(ForebayError):
    """The first line and the headers of a request are over the limit; the connection is closed."""

    code = "head_too_large"
    status = 431

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(
            f"the first line and the headers are larger than {limit_bytes} bytes",
            hint="send less in them, or raise max_head_bytes of the server",
        )


class SweptConnection(Protocol):
    """What is asked of a connection."""

    loop: asyncio.AbstractEventLoop
    has_sent_body: bool
    """Whether a body of its requests was read: keys are asked for before that."""
    reply_patience_s: Callable[[float], float] | None
    """For how many more seconds the reply under way may stand still, given for how many it has; else a bound."""

    @property
    def waits_for(self) -> str:
        """What the client owes.

        The rest of a ``head`` or of a ``body``, a next request (``idle``), to ``take`` more of a
        reply, or its end before the connection closes, or to ``end`` the connection itself after a
        refusal; empty where it owes nothing.
        """

    @property
    def progress(self) -> int:
        """A number that changes while the client goes on with it."""

    def end_wait(self, waited_for: str) -> None:
        """It owed this for too long."""


class _Standing(NamedTuple):
    """Where a connection stood, and since when."""

    waits_for: str
    progress: int
    since_s: float


def _is_idle(connection: SweptConnection) -> bool:
    """Whether no request is under way: one that was refused, and whose body nothing reads, is none."""
    waits_for = connection.waits_for
    return waits_for in ("idle", "head", "end") or (waits_for == "body" and not connection.has_sent_body)


class ConnectionSweep:
    """Looks at all connections of a server about once a second, or more often for shorter bounds."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._bounds_s = {
            "head": limits.head_timeout_s,
            "body": limits.body_timeout_s,
            "idle": limits.idle_timeout_s,
            "take": limits.idle_timeout_s,
            "end": LINGER_S,
        }
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        # Journal, engines and run processes need the other half of the descriptors.
        self._most = sys.maxsize if limit == resource.RLIM_INFINITY else limit // 2
        self._interval_s = min(INTERVAL_S, *(bound / 4 for bound in self._bounds_s.values()))
        self._seen: dict[SweptConnection, _Standing | None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._ends_at_s: float | None = None

    def add(self, connection: SweptConnection) -> None:
        """Look at it from now on. Where there are too many, the oldest that waits for a request is closed, or this one.

        Those that never sent a body go first.
        """
        if len(self._seen) >= self._most:
            idle = filter(_is_idle, self._seen)
            min(islice(idle, NUM_WEIGHED), key=attrgetter("has_sent_body"), default=connection).end_wait("take")
        self._seen[connection] = None
        if self._timer is None:
            self._timer = connection.loop.call_later(self._interval_s, self._sweep, connection.loop)

    def discard(self, connection: SweptConnection) -> None:
        """It has ended."""
        self._seen.pop(connection, None)

    def end(self, loop: asyncio.AbstractEventLoop) -> None:
        """The server ends: break off what stands still, and in the end what is still under way."""
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
                connection.end_wait("take" if is_ending else waits_for)  # at the end, without an answer
        self._timer = loop.call_later(self._interval_s, self._sweep, loop) if self._seen else None
