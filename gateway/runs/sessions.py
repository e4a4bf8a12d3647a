"""One base URL that an agent was given: until when it is open, what its calls get by default, those in flight.

A rollout stays on one engine: what it has asked before is in that engine's cache.

Where the turns of a session go: in the order in which its calls ended, though some are looked up afterwards.

Who calls the gateway: the agent of a rollout, or a generator that is captured.
"""

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Protocol

from forebay.core.clock import ActiveClock
from forebay.core.waiting import Signal
from forebay.engines.balance import Member
from forebay.engines.capture.turn import Turn
from forebay.engines.ring import EngineRing, Target
from forebay.gateway.dialects.dialect import Memory
from forebay.gateway.lenient_json import bounded
from forebay.gateway.refusals import Over

OVERLOAD_FACTOR = 2
OVERLOAD_CALLS = 8
"""An engine is overloaded with more calls than ``OVERLOAD_FACTOR`` times those of the least loaded one plus these."""


class Affinity:
    """The engine that the calls of one rollout go to, as long as it answers and is not overloaded."""

    def __init__(self, ring: EngineRing) -> None:
        self._ring = ring
        self._held: Member[Target] | None = None

    async def choose(self) -> Member[Target]:
        """The engine for the next call. Waits while none answers."""
        least = await self._ring.take()
        held = self._held
        if held is None or held.failures or _is_overloaded(held, least):
            self._held = least
        assert self._held is not None
        return self._held


def _is_overloaded(held: Member[Target], least: Member[Target]) -> bool:
    return held.in_flight > OVERLOAD_FACTOR * least.in_flight + OVERLOAD_CALLS


Asking = Coroutine[Any, Any, Sequence[Turn]]


class TurnLog:
    """Hands turns to ``take``, one call's after another's."""

    def __init__(self, take: Callable[[Sequence[Turn]], None]) -> None:
        self._take = take
        self._pending: list[asyncio.Task[None]] = []
        """In order; each waits for the one before it."""

    def add(self, turns: Sequence[Turn]) -> None:
        """Turns that are known."""
        if self._pending:
            self.add_later(_known(turns))
        else:
            self._take(turns)

    def add_later(self, turns: Asking) -> None:
        """Turns of which something is still asked: nobody waits for that but who looks at the record."""
        before = self._pending[-1] if self._pending else None
        task = asyncio.create_task(self._add(before, turns))
        self._pending.append(task)
        task.add_done_callback(self._pending.remove)
        task.add_done_callback(lambda _: turns.close())  # a task that is cancelled at once never starts it

    async def settled(self) -> None:
        """Return when everything that was added has been handed on."""
        while self._pending:
            await asyncio.wait(self._pending)

    def drop(self) -> None:
        """Hand on nothing more."""
        for task in self._pending:
            task.cancel()

    async def _add(self, before: asyncio.Task[None] | None, turns: Asking) -> None:
        known = await turns
        if before is not None:
            await asyncio.wait([before])
        self._take(known)


async def _known(turns: Sequence[Turn]) -> Sequence[Turn]:
    return turns


LIMITS = ("max_completion_tokens", "max_tokens")
MAX_FAILURES = 100
"""Newest failures of a session that are kept."""

Failure = dict[str, Any]
"""``kind`` (``engine``: unreachable, broken, 5xx, out of time; ``agent``: what the engine refused), status, message."""


class Session:
    """What the calls under one base URL have in common.

    ``rid_prefix`` begins the ``rid`` of every request. After ``deadline_s`` seconds by ``clock`` its calls are ended
    and no further ones taken. ``defaults`` are sampling parameters for calls that leave them out; no call may sample
    more than ``max_tokens``. What the engine answered goes to ``turns``.
    """

    def __init__(
        self,
        affinity: Affinity,
        clock: ActiveClock,
        rid_prefix: str,
        deadline_s: float,
        turns: TurnLog,
        *,
        session_id: str = "",
        defaults: dict[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> None:
        self.session_id = session_id
        self.affinity = affinity
        self.rid_prefix = rid_prefix
        self.turns = turns
        self.num_calls = 0
        self.failures: deque[Failure] = deque(maxlen=MAX_FAILURES)
        self.counters: Counter[str] = Counter()
        self.requests: set[tuple[str, str]] = set()
        """Those that engines are working on: address and ``rid``."""
        self.is_given_up = False
        """What engines abort is not gone on with."""
        self._defaults = defaults or {}
        self._max_tokens = max_tokens
        self._numbers = itertools.count()
        self._loop = asyncio.get_running_loop()
        self._clock = clock
        self.ends_s = clock.now_s() + deadline_s
        """By the clock of its run."""
        self._closed = ""
        self._news = Signal()
        self._in_flight: set[asyncio.Timeout] = set()
        self._left: set[asyncio.Timeout] = set()
        """Of calls whose agent is gone."""

    @property
    def is_busy(self) -> bool:
        """Whether a call is in flight."""
        return bool(self._in_flight)

    def next_rid(self) -> str:
        """The ``rid`` of the next request to an engine. All are of one length: engines abort by prefix."""
        return f"{self.rid_prefix}{next(self._numbers):04x}"

    def prepared(self, body: dict[str, Any]) -> dict[str, Any]:
        """The body of a call with the defaults in it, and within the bound on tokens."""
        told = {name for name, value in body.items() if value is not None}
        if told & set(LIMITS):
            told |= set(LIMITS)
        prepared = {**body, **{name: value for name, value in self._defaults.items() if name not in told}}
        return prepared if self._max_tokens is None else _bounded(prepared, self._max_tokens)

    @asynccontextmanager
    async def call(self) -> AsyncIterator[asyncio.Timeout]:
        """Around one call of the agent. Raises ``Over`` once the session is, also in the middle of the call."""
        if self._closed:
            raise Over(self._closed)
        try:
            async with asyncio.timeout_at(self._until_s()) as limit:
                self._in_flight.add(limit)
                try:
                    yield limit
                finally:
                    self._in_flight.discard(limit)
                    self._left.discard(limit)
                    self._news.notify()
        except TimeoutError:
            if not limit.expired():
                raise
            raise Over(self._closed or "its time is up", is_late=not self._closed) from None

    @contextmanager
    def asking(self, engine_url: str, rid: str) -> Iterator[None]:
        """Around one request to an engine."""
        self.requests.add((engine_url, rid))
        try:
            yield
        finally:
            self.requests.discard((engine_url, rid))

    def leave(self, call: asyncio.Timeout, within_s: float) -> None:
        """The agent of a call is gone: it ends by itself, in so many seconds at most, also when the session is over."""
        if not call.expired():
            self._in_flight.discard(call)
            self._left.add(call)
            call.reschedule(self._loop.time() + within_s)

    def close(self, reason: str) -> None:
        """End all its calls; their agents are told ``reason``."""
        self._closed = reason
        self._reschedule(self._loop.time())

    def note_clock(self) -> None:
        """The clock stands still, or goes on: the calls in flight have as much of the time left as before."""
        if not self._closed:
            self._reschedule(self._until_s())

    def _until_s(self) -> float | None:
        """When its time is up, by the event loop; None while the clock stands still before that."""
        left_s = self.ends_s - self._clock.now_s()
        return self._loop.time() + left_s if self._clock.is_running or left_s <= 0 else None

    def _reschedule(self, until_s: float | None) -> None:
        for limit in self._in_flight:
            if not limit.expired():
                limit.reschedule(until_s)

    async def wait_idle(self) -> None:
        """Return when no call is in flight any more, and everything is recorded."""
        while self._in_flight or self._left:
            await self._news.wait(1.0)
        await self.turns.settled()

    def fail(self, kind: str, status: int, message: str) -> None:
        """Note a call that the agent got an error for."""
        told = {"kind": kind, "status": status, "message": message[:1_000], "call": self.num_calls}
        self.failures.append(told)


def _bounded(body: dict[str, Any], limit: int) -> dict[str, Any]:
    """A limit that is no number is the engine's to refuse."""
    told = {name: bounded(body[name], limit) for name in LIMITS if body.get(name) is not None}
    return {**body, **(told or {"max_tokens": limit})}


class Agent(Protocol):
    """What its calls have in common."""

    @property
    def session(self) -> Session: ...

    @property
    def memory(self) -> Memory: ...
