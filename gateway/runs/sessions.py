"""What the calls under one base URL share: their engine, their deadline, their defaults, and the order of their record.

A session stands behind each rollout (``rollouts.py``), and behind each single call of a captured run
(``captured_run.py``). Its ``Affinity`` chooses the engine, its ``TurnLog`` takes the recorded turns.
"""

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NoReturn

from forebay.core.clock import ActiveClock
from forebay.core.waiting import Signal
from forebay.engines.capture.token_cap import LIMIT_NAMES, TokenCap
from forebay.engines.capture.turn import Turn
from forebay.engines.pool import EnginePool, Member
from forebay.gateway.dialects.dialect import CrossCallState
from forebay.gateway.lenient_json import bounded
from forebay.gateway.off_loop import MANY_MESSAGES, off_loop_if
from forebay.gateway.refusals import Over
from forebay.gateway.runs.run_trace import SessionTrace

OVERLOAD_FACTOR = 2
OVERLOAD_CALLS = 8
"""An engine is overloaded with more calls than ``OVERLOAD_FACTOR`` times those of the least loaded one plus these."""
CAP_REACHED = "it has sampled as many tokens as its cap allows"
MAX_FAILURES = 100
"""Newest failures of a session that are kept."""

Failure = dict[str, Any]
"""``kind`` (``engine``: unreachable, broken, 5xx, out of time; ``environment``: it ended while no engine answered;
``agent``: what the engine refused), status, message."""


class Session:
    """What the calls under one base URL have in common.

    ``rid_prefix`` begins the ``rid`` of every request. After ``deadline_s`` seconds by ``clock`` its calls are ended
    and no further ones taken. ``defaults`` are sampling parameters for calls that leave them out; no call may sample
    more than ``max_tokens``, nor all of them more than ``cap_tokens``. What the engine answered goes to ``turns``, how
    long all took to ``trace``.
    """

    def __init__(
        self,
        affinity: "Affinity",
        clock: ActiveClock,
        rid_prefix: str,
        deadline_s: float,
        turns: "TurnLog",
        trace: SessionTrace,
        *,
        session_id: str = "",
        defaults: dict[str, Any] | None = None,
        max_tokens: int | None = None,
        cap_tokens: int | None = None,
    ) -> None:
        self.session_id = session_id
        self.affinity = affinity
        self.rid_prefix = rid_prefix
        self.turns = turns
        self.trace = trace
        self.memory = CrossCallState()
        self.num_calls = 0
        self.failures: deque[Failure] = deque(maxlen=MAX_FAILURES)
        self.counters: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()
        """What its calls had that the record does not hold."""
        self.requests: set[tuple[str, str]] = set()
        """Those that engines are working on: address and ``rid``."""
        self.cap = TokenCap(cap_tokens)
        self.is_capped = False
        """Its cap has ended it."""
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
        self._changed = Signal()
        self._in_flight: set[asyncio.Timeout] = set()
        self._left: set[asyncio.Timeout] = set()
        """Of calls whose agent is gone."""

    @property
    def is_busy(self) -> bool:
        """Whether a call is in flight."""
        return bool(self._in_flight)

    async def choose_engine(self) -> Member:
        """The engine for the next call. Waits while none answers, which is noted of a call that ends meanwhile."""
        try:
            return await self.affinity.choose()
        except asyncio.CancelledError:
            if self._clock.now_s() < self.ends_s:  # else its time is up, which is noted as such
                self.note_failure("environment", 503, "no engine answered the call")
            raise

    def next_rid(self) -> str:
        """The ``rid`` of the next request to an engine."""
        # All of one length: SGLang aborts by prefix, and "1" must not end "10" as well.
        return f"{self.rid_prefix}{next(self._numbers):04x}"

    def prepared(self, body: dict[str, Any]) -> dict[str, Any]:
        """The body of a call with the defaults in it, and within the bound on tokens."""
        given = {name for name, value in body.items() if value is not None}
        if given & set(LIMIT_NAMES):  # whoever gives either has given both
            given |= set(LIMIT_NAMES)
        prepared = {**body, **{name: value for name, value in self._defaults.items() if name not in given}}
        if self._max_tokens is None:
            return prepared
        # A limit that is no number stays: it is the engine's to refuse.
        named = [name for name in LIMIT_NAMES if prepared.get(name) is not None]
        limits = {name: bounded(prepared[name], self._max_tokens) for name in named}
        return {**prepared, **(limits or {"max_tokens": self._max_tokens})}

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
                    # It is in one of both: ``leave`` moves the call of an agent that is gone.
                    self._in_flight.discard(limit)
                    self._left.discard(limit)
                    self._changed.notify()
        except TimeoutError:
            if not limit.expired():  # one from inside the call
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
        # An expired limit cannot be moved: the call is ending already.
        if not call.expired():
            self._in_flight.discard(call)
            self._left.add(call)
            call.reschedule(self._loop.time() + within_s)

    def close(self, reason: str) -> None:
        """End all its calls, with ``reason`` as the answer to their agents."""
        self._closed = reason
        self._reschedule(self._loop.time())

    def end_capped(self) -> NoReturn:
        """The cap is reached: ends its calls, and takes no further ones. Raises ``Over``."""
        self.is_capped = True
        self.close(CAP_REACHED)
        raise Over(CAP_REACHED)

    def note_clock(self) -> None:
        """The clock has stopped, or goes on: the calls in flight have as much of the time left as before."""
        if not self._closed:
            self._reschedule(self._until_s())

    def _until_s(self) -> float | None:
        """When its time is up, by the event loop; None while the clock is stopped before that."""
        left_s = self.ends_s - self._clock.now_s()
        return self._loop.time() + left_s if self._clock.is_running or left_s <= 0 else None

    def _reschedule(self, until_s: float | None) -> None:
        for limit in self._in_flight:
            if not limit.expired():
                limit.reschedule(until_s)

    async def wait_idle(self) -> None:
        """Return when no call is in flight any more, and everything is recorded."""
        while self._in_flight or self._left:
            await self._changed.wait(1.0)  # looked at again each second, whatever was missed
        await self.turns.drain()

    def note_failure(self, kind: str, status: int, message: str) -> None:
        """Note a call that the agent got an error for."""
        self.failures.append({"kind": kind, "status": status, "message": message[:1_000], "call": self.num_calls})


class Affinity:
    """The engine that the calls of one rollout go to: what it has asked before is in that engine's cache.

    It changes when that engine does not answer, or is overloaded. The ``preferred`` one is asked whenever it can be.
    """

    def __init__(self, pool: EnginePool, preferred: str | None = None) -> None:
        self._pool = pool
        self._preferred = preferred
        self._chosen: Member | None = None

    async def choose(self) -> Member:
        """The engine for the next call. Waits while none answers."""
        least = await self._pool.take()
        chosen = self._chosen
        if self._preferred is not None and (chosen is None or chosen.server.url != self._preferred):
            named = await self._pool.take(self._preferred)
            chosen = named if named.server.url == self._preferred else chosen
        if chosen is None or chosen.failures or chosen.in_flight > OVERLOAD_FACTOR * least.in_flight + OVERLOAD_CALLS:
            chosen = least
        self._chosen = chosen
        return chosen


class TurnLog:
    """Hands turns to ``take`` in the order in which their calls ended, though some are looked up afterwards."""

    def __init__(self, take: Callable[[Sequence[Turn]], None], *, may_take_in_thread: bool = False) -> None:
        self._take = take
        self._may_take_in_thread = may_take_in_thread
        self._pending: list[asyncio.Task[None]] = []
        """In order; each waits for the one before it."""

    def add(self, turns: Sequence[Turn]) -> None:
        """Turns that are known."""
        if self._pending or self._is_for_thread(turns):
            self.add_later(_known(turns))
        else:
            self._take(turns)

    def add_later(self, turns: Coroutine[Any, Any, Sequence[Turn]]) -> None:
        """Turns of which something is being asked: nobody waits for that but who looks at the record."""
        before = self._pending[-1] if self._pending else None
        task = asyncio.create_task(self._add(before, turns))
        self._pending.append(task)
        task.add_done_callback(self._pending.remove)
        task.add_done_callback(lambda _: turns.close())  # a task that is cancelled at once never starts it

    async def drain(self) -> None:
        """Return when everything that was added has been handed on."""
        while self._pending:
            await asyncio.wait(self._pending)

    def drop(self) -> None:
        """Hand on nothing more."""
        for task in self._pending:
            task.cancel()

    async def _add(self, before: asyncio.Task[None] | None, turns: Coroutine[Any, Any, Sequence[Turn]]) -> None:
        known = await turns
        if before is not None:
            await asyncio.wait([before])  # not awaited itself: its failure, or its end, is not this one's
        await off_loop_if(self._is_for_thread(known), lambda: self._take(known))

    def _is_for_thread(self, turns: Sequence[Turn]) -> bool:
        return self._may_take_in_thread and any(len(turn.messages) > MANY_MESSAGES for turn in turns)


async def _known(turns: Sequence[Turn]) -> Sequence[Turn]:
    return turns
