"""The choices that a scripted engine works on, and what pauses, aborts and new weights do to them."""

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager

from forebay.engines.scripted_call import Reply, Script, ScriptedCall
from forebay.engines.scripted_play import Weights, first_of, play

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
