"""The choices that a scripted engine works on, and what pauses, aborts and new weights do to them.

How a scripted reply is said: token by token over its time, with pauses, aborts and new weights in the middle.
"""

import asyncio
import inspect
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager

from forebay.engines.scripted.script import Reply, Script, ScriptedCall
from forebay.engines.scripted.tokens import TURN_START

FIRST_VERSION = "default"
"""What SGLang calls the weights that it was started with."""

TICK_S = 0.005
SPACE = ord(" ")


class Weights:
    """The weights that a scripted engine says it has, and whether it is paused."""

    def __init__(self) -> None:
        self.version = FIRST_VERSION
        self.mode: str | None = None
        """``abort``, ``retract`` or ``in_place`` while generation is paused."""
        self._open = asyncio.Event()
        self._open.set()
        self._paused = asyncio.Event()

    def pause(self, mode: str) -> None:
        """Stop saying tokens."""
        self.mode = mode
        self._open.clear()
        self._paused.set()

    def resume(self) -> None:
        """Go on."""
        self.mode = None
        self._paused.clear()
        self._open.set()

    async def opened(self) -> None:
        """Return while generation is not paused."""
        await self._open.wait()

    async def may_go_on(self, call: ScriptedCall) -> None:
        """Return when ``call`` may say more or end. An aborted one ends at once, but not while paused in place."""
        if self.mode == "retract":
            call.num_retractions += 1
        while self.mode is not None:
            waits = [self._open] if self.mode == "in_place" else [self._open, call.aborted]
            await first_of(waits)
            if call.aborted.is_set() and self.mode != "in_place":
                return

    async def interrupted(self, call: ScriptedCall, timeout_s: float | None) -> None:
        """Return after the time, or as soon as the call is aborted or generation is paused."""
        await first_of([call.aborted, self._paused], timeout_s)


async def first_of(events: Sequence[asyncio.Event], timeout_s: float | None = None) -> None:
    """Return when one of the events is set, or after ``timeout_s`` seconds."""
    tasks = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def play(call: ScriptedCall, weights: Weights) -> AsyncGenerator[int, None]:
    """Say the reply of ``call``; yields how many tokens are said by now, and ends with ``call.finished`` set."""
    whole = call.reply.tokens()
    plan = whole[: call.limit]
    while True:
        await weights.may_go_on(call)
        if call.aborted.is_set():
            call.finished = "abort"
            return
        start = len(call.sampled_ids)
        if start == len(plan) and not call.reply.hang:
            break
        num_said = await _say_some(call, plan, weights)
        if num_said:
            call.sampled_ids += plan[start : start + num_said]
            call.versions += [weights.version] * num_said
            yield len(call.sampled_ids)
    call.finished = call.reply.reason if plan == whole else "length"


async def _say_some(call: ScriptedCall, plan: list[int], weights: Weights) -> int:
    """Wait for the next tokens to be said; how many there are."""
    start = len(call.sampled_ids)
    if start == len(plan):
        await weights.interrupted(call, None)
        return 0
    interval_s = _interval_s(call.reply, len(plan))
    if not interval_s:
        return _word(plan, start) if call.body.get("stream") else len(plan) - start
    num_due = min(len(plan) - start, max(1, round(TICK_S / interval_s)))
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await weights.interrupted(call, num_due * interval_s)
    if call.aborted.is_set() or weights.mode is not None:
        return min(num_due, int((loop.time() - began_s) / interval_s))
    return num_due


def _interval_s(reply: Reply, num_tokens: int) -> float:
    return 1 / reply.tokens_per_s if reply.tokens_per_s else reply.delay_s / max(1, num_tokens)


def _word(plan: list[int], start: int) -> int:
    """How many tokens there are up to the next space or mark."""
    ends = (at for at in range(start + 1, len(plan)) if plan[at] == SPACE or plan[at] >= TURN_START)
    return next(ends, len(plan)) - start


logger = logging.getLogger(__name__)

Tell = Callable[[ScriptedCall], None]


class Work:
    """Every choice asked for so far, those being worked on, and the weights."""

    def __init__(self, script: Script) -> None:
        self.calls: list[ScriptedCall] = []
        self.aborts: list[str] = []
        self.max_in_flight = 0
        self.weights = Weights()
        self._script = script
        self._running: set[ScriptedCall] = set()
        self._stopping = False

    def open(self) -> None:
        """Get ready for the event loop that is going to serve, with the weights of the beginning."""
        self.weights = Weights()
        self._stopping = False
        self._changed = asyncio.Condition()

    @property
    def in_flight(self) -> int:
        """The choices being worked on now."""
        return len(self._running)

    def rid_in_flight(self, rid: str | None) -> bool:
        """Whether a call under exactly this id is being worked on."""
        return rid is not None and any(call.rid == rid for call in self._running)

    async def wait_until(self, holds: Callable[[], bool], timeout_s: float | None) -> None:
        """Return once ``holds()`` is true; looked at whenever a call begins or ends. Raises ``TimeoutError``."""
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(holds)

    async def run(self, calls: Sequence[ScriptedCall], tell: Tell) -> None:
        """Answer the choices of one request; ``tell`` hears whenever one has grown or ended."""
        for call in calls:
            if call.is_asked:
                call.number = len(self.calls)
                self.calls.append(call)
        await self._tell_change()
        # Like SGLang, which admits nothing while it is paused: such a call is in no load, and aborts miss it.
        await self.weights.opened()
        if self._stopping:
            _abort(calls)
        async with self._worked_on(calls):
            await asyncio.gather(*(self._answer(call, tell) for call in calls))

    def abort(self, rid_prefix: str) -> None:
        """End the calls whose id begins so; the empty text means all."""
        self.aborts.append(rid_prefix)
        _abort(call for call in self._running if (call.rid or "").startswith(rid_prefix))

    def stop_all(self) -> None:
        """Abort every call that runs, also those that a pause holds."""
        self._stopping = True
        self.weights.resume()
        _abort(self._running)

    async def pause(self, mode: str) -> None:
        """Stop generating; ``abort`` ends what runs and returns when it is gone."""
        self.weights.pause(mode)
        if mode == "abort":
            self.abort("")
            await self.wait_until(lambda: not self._running, None)

    async def update(self, version: str | None, *, aborts: bool) -> None:
        """Take new weights: while paused at once, else when nothing runs any more."""
        if aborts:
            self.abort("")
        if self.weights.mode is None:
            await self.wait_until(lambda: not self._running, None)
        self.weights.version = version or self.weights.version

    @asynccontextmanager
    async def _worked_on(self, calls: Sequence[ScriptedCall]) -> AsyncIterator[None]:
        self._running.update(calls)
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        await self._tell_change()
        try:
            yield
        finally:
            self._running.difference_update(calls)
            await self._tell_change()

    async def _answer(self, call: ScriptedCall, tell: Tell) -> None:
        call.asked_version = self.weights.version
        try:
            await self._play(call, tell)
        finally:
            call.finished = call.finished or "disconnected"
            self._running.discard(call)
            tell(call)
            await self._tell_change()

    async def _play(self, call: ScriptedCall, tell: Tell) -> None:
        asking = asyncio.create_task(self._ask(call))
        stopped = asyncio.create_task(call.aborted.wait())
        try:
            await asyncio.wait({asking, stopped}, return_when=asyncio.FIRST_COMPLETED)
            call.reply = asking.result() if asking.done() else Reply()
        finally:
            asking.cancel()
            stopped.cancel()
        if call.reply.error_status is not None:
            await first_of([call.aborted], call.reply.delay_s)
            call.finished = "error"
            return
        async with aclosing(play(call, self.weights)) as growth:
            async for _ in growth:
                tell(call)

    async def _ask(self, call: ScriptedCall) -> Reply:
        if not call.is_asked:
            return Reply(finish_reason="length")
        try:
            answer = self._script(call)
            if inspect.isawaitable(answer):
                answer = await answer
        except Exception as error:  # the script is the user's: its error is the answer, and is told
            logger.warning("the script raised on call %d", call.number, exc_info=True)
            return Reply(text=f"the script raised {error!r}", error_status=500)
        return Reply(text=answer) if isinstance(answer, str) else answer

    async def _tell_change(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _abort(calls: Iterable[ScriptedCall]) -> None:
    for call in calls:
        call.aborted.set()
