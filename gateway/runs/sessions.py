"""State shared by the calls under one base URL: engine, deadline, defaults, and the order of their record.

Each rollout (``rollouts.py``) and each call of a captured run (``captured_run.py``) has a session. Its ``Affinity``
chooses the engine, its ``TurnLog`` receives the recorded turns.
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
from forebay.engines.capture.trajectory import Trajectory
from forebay.engines.capture.turn import Turn
from forebay.engines.pool import EnginePool, Member
from forebay.gateway.dialects.dialect import CrossCallState
from forebay.gateway.lenient_json import bounded
from forebay.gateway.off_loop import MANY_MESSAGES, off_loop_if
from forebay.gateway.refusals import Over
from forebay.gateway.runs.reasoning import ReasoningMemo
from forebay.gateway.runs.run_trace import SessionTrace

OVERLOAD_FACTOR = 2
OVERLOAD_CALLS = 8
"""An engine is overloaded above ``OVERLOAD_FACTOR`` times the least loaded engine's calls plus this number."""
CAP_REACHED = "it reached its token cap"
MAX_FAILURES = 100
"""Number of the newest failures kept per session."""

Failure = dict[str, Any]
"""``kind``, status and message. Kinds: ``engine`` (unreachable, broken, 5xx, timeout), ``environment`` (the call ended
while no engine answered), ``agent`` (the engine rejected the request)."""


class Session:
    """State shared by the calls under one base URL.

    ``rid_prefix`` begins the ``rid`` of every request. After ``deadline_s`` seconds of ``clock`` its calls end, and new
    ones are rejected. ``defaults`` are sampling parameters for calls that omit them. No call may sample more than
    ``max_tokens``, nor all of them together more than ``cap_tokens``. ``turns`` receives the engine's answers,
    ``trace`` the timings. Only a session whose turns are ``recorded`` asks engines for arrays per token.
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
        recorded: Trajectory | None = None,
    ) -> None:
        self.session_id = session_id
        self.affinity = affinity
        self.rid_prefix = rid_prefix
        self.turns = turns
        self.trace = trace
        self.recorded = recorded
        self.memory = CrossCallState()
        self.reasoning: ReasoningMemo | None = None
        """None unless its run has ``restore_reasoning``."""
        self.num_calls = 0
        self.failures: deque[Failure] = deque(maxlen=MAX_FAILURES)
        self.counters: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()
        """Features of its calls that the record does not contain, by kind."""
        self.requests: set[tuple[str, str]] = set()
        """Requests in progress at engines: address and ``rid``."""
        self.cap = TokenCap(cap_tokens)
        self.is_capped = False
        """Whether its cap ended it."""
        self.is_given_up = False
        """Whether aborted calls are no longer continued."""
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
        """Time limits of calls whose agent is gone."""

    @property
    def is_busy(self) -> bool:
        """Whether a call is in flight."""
        return bool(self._in_flight)

    async def choose_engine(self) -> Member:
        """Return the engine for the next call. Waits while none answers."""
        with self.without_engine():
            return await self.affinity.choose()

    @contextmanager
    def without_engine(self) -> Iterator[None]:
        """Wait for an engine inside this context: if the call ends meanwhile, the failure is noted."""
        try:
            yield
        except asyncio.CancelledError:
            if self._clock.now_s() < self.ends_s:  # otherwise its time is up, which is noted elsewhere
                self.note_failure("environment", 503, "no engine answered the call")
            raise

    def next_rid(self) -> str:
        """Return the ``rid`` of the next request to an engine."""
        # Equal lengths, because SGLang aborts by prefix and "1" must not match "10".
        return f"{self.rid_prefix}{next(self._numbers):04x}"

    def prepared(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body of a call with the defaults added and the token limit applied."""
        given = {name for name, value in body.items() if value is not None}
        if given & set(LIMIT_NAMES):  # either name sets the limit
            given |= set(LIMIT_NAMES)
        prepared = {**body, **{name: value for name, value in self._defaults.items() if name not in given}}
        if self._max_tokens is None:
            return prepared
        # A limit that is not a number is kept: the engine rejects it.
        named = [name for name in LIMIT_NAMES if prepared.get(name) is not None]
        limits = {name: bounded(prepared[name], self._max_tokens) for name in named}
        return {**prepared, **(limits or {"max_tokens": self._max_tokens})}

    @asynccontextmanager
    async def call(self) -> AsyncIterator[asyncio.Timeout]:
        """Track one call of the agent. Raises ``Over`` if the session is over, or ends during the call."""
        if self._closed:
            raise Over(self._closed)
        try:
            async with asyncio.timeout_at(self._until_s()) as limit:
                self._in_flight.add(limit)
                try:
                    yield limit
                finally:
                    # In one of the two: ``leave`` moves the call of an agent that is gone.
                    self._in_flight.discard(limit)
                    self._left.discard(limit)
                    self._changed.notify()
        except TimeoutError:
            if not limit.expired():  # a timeout from inside the call
                raise
            raise Over(self._closed or "its deadline has passed", is_late=not self._closed) from None

    @contextmanager
    def asking(self, engine_url: str, rid: str) -> Iterator[None]:
        """Track one request to an engine."""
        self.requests.add((engine_url, rid))
        try:
            yield
        finally:
            self.requests.discard((engine_url, rid))

    def leave(self, call: asyncio.Timeout, within_s: float) -> None:
        """End a call whose agent is gone within ``within_s`` seconds, even after the session ended."""
        # An expired limit cannot be rescheduled: the call is already ending.
        if not call.expired():
            self._in_flight.discard(call)
            self._left.add(call)
            call.reschedule(self._loop.time() + within_s)

    def close(self, reason: str) -> None:
        """End all its calls; their agents get ``reason`` as the error."""
        self._closed = reason
        self._reschedule(self._loop.time())

    def end_capped(self) -> NoReturn:
        """End all calls because the cap is reached, and reject new ones. Raises ``Over``."""
        self.is_capped = True
        self.close(CAP_REACHED)
        raise Over(CAP_REACHED)

    def note_clock(self) -> None:
        """Adjust the limits of calls in flight after the clock was paused or resumed."""
        if not self._closed:
            self._reschedule(self._until_s())

    def _until_s(self) -> float | None:
        """When its time is up, in the event loop's time; None while the clock is paused with time left."""
        left_s = self.ends_s - self._clock.now_s()
        return self._loop.time() + left_s if self._clock.is_running or left_s <= 0 else None

    def _reschedule(self, until_s: float | None) -> None:
        for limit in self._in_flight:
            if not limit.expired():
                limit.reschedule(until_s)

    async def wait_idle(self) -> None:
        """Return once no call is in flight and everything is recorded."""
        while self._in_flight or self._left:
            await self._changed.wait(1.0)  # checked again every second, in case a notification was missed
        await self.turns.drain()

    def note_failure(self, kind: str, status: int, message: str) -> None:
        """Record a call for which the agent got an error."""
        self.failures.append({"kind": kind, "status": status, "message": message[:1_000], "call": self.num_calls})


class Affinity:
    """The engine for the calls of one rollout, which has the rollout's earlier prompts in its cache.

    Changes if that engine does not answer or is overloaded. The ``preferred`` engine is used whenever possible.
    """

    def __init__(self, pool: EnginePool, preferred: str | None = None) -> None:
        self._pool = pool
        self._preferred = preferred
        self._chosen: Member | None = None

    async def choose(self) -> Member:
        """Return the engine for the next call. Waits while none answers."""
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
    """Passes turns to ``take`` in the order in which their calls ended, even if some are completed later."""

    def __init__(self, take: Callable[[Sequence[Turn]], None], *, may_take_in_thread: bool = False) -> None:
        self._take = take
        self._may_take_in_thread = may_take_in_thread
        self._pending: list[asyncio.Task[None]] = []
        """In order; each waits for the previous one."""

    def add(self, turns: Sequence[Turn]) -> None:
        """Add turns that are complete."""
        if self._pending or self._is_for_thread(turns):
            self.add_later(_known(turns))
        else:
            self._take(turns)

    def add_later(self, turns: Coroutine[Any, Any, Sequence[Turn]]) -> None:
        """Add turns that are still being completed; only readers of the record wait for them."""
        before = self._pending[-1] if self._pending else None
        task = asyncio.create_task(self._add(before, turns))
        self._pending.append(task)
        task.add_done_callback(self._pending.remove)
        task.add_done_callback(lambda _: turns.close())  # a task that is cancelled at once never runs it

    async def drain(self) -> None:
        """Return once all added turns were passed to ``take``."""
        while self._pending:
            await asyncio.wait(self._pending)

    def drop(self) -> None:
        """Discard the pending turns."""
        for task in self._pending:
            task.cancel()

    async def _add(self, before: asyncio.Task[None] | None, turns: Coroutine[Any, Any, Sequence[Turn]]) -> None:
        known = await turns
        if before is not None:
            await asyncio.wait([before])  # not awaited directly: its error or cancellation does not concern this one
        await off_loop_if(self._is_for_thread(known), lambda: self._take(known))

    def _is_for_thread(self, turns: Sequence[Turn]) -> bool:
        return self._may_take_in_thread and any(len(turn.messages) > MANY_MESSAGES or turn.arrays for turn in turns)


async def _known(turns: Sequence[Turn]) -> Sequence[Turn]:
    return turns
