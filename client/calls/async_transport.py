"""The awaited driver: ``transport.py`` for asyncio, whose calls can be interrupted without cancelling their tasks."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import httpx

from forebay.client.calls.flow import Call, Flow, Lost, Pause, ServerReply, Work
from forebay.client.calls.transport import http_options, lost_by, reply_of, request_of
from forebay.client.errors import ClientClosed

T = TypeVar("T")

CUT_S = 2.0
"""Seconds that tasks have to close their connections."""


class Breakable:
    """Parts of tasks that can be interrupted without cancelling the tasks."""

    def __init__(self) -> None:
        self._limits: set[asyncio.Timeout] = set()
        self._idle = asyncio.Event()
        self._is_cut = False

    @asynccontextmanager
    async def part(self) -> AsyncIterator[None]:
        """Raise ``ClientClosed`` from the block when it is cut."""
        self.check()
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._limits.add(limit)
                yield
        except TimeoutError:
            self.check()  # this limit has no time of its own: only ``cut`` expires it
            raise  # the timeout came from inside the block
        finally:
            self._limits.discard(limit)
            if not self._limits:
                self._idle.set()

    async def cut(self) -> None:
        """Interrupt all parts in progress, and wait until their connections are closed."""
        self._is_cut = True
        self._idle.clear()
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(0.0)  # a time in the past: each part ends at its next step of the event loop
        if self._limits:
            with suppress(TimeoutError):
                async with asyncio.timeout(CUT_S):
                    await self._idle.wait()

    def check(self) -> None:
        """Raise ``ClientClosed`` after ``cut``."""
        if self._is_cut:
            raise ClientClosed


class AsyncTransport:
    """``Transport`` for asyncio, within one event loop."""

    def __init__(self, url: str, token: str | None = None, *, may_ask_proxy: bool = True) -> None:
        self._http = httpx.AsyncClient(**http_options(url, token, may_ask_proxy))
        self._breakable = Breakable()

    async def run(self, flow: Flow[T], pause: Callable[[Pause], Awaitable[object]] | None = None) -> T:
        """Run ``flow`` and return its result. Raises ``ClientClosed`` when the transport is cut."""
        return await _drive_awaited(flow, self.ask, pause or self._pause)

    async def ask(self, call: Call) -> ServerReply | Lost:
        """Make ``call`` once. Raises ``ClientClosed`` when the transport is cut."""
        async with self._breakable.part():
            return await self._send(call)

    async def _pause(self, pause: Pause) -> None:
        async with self._breakable.part():
            await asyncio.sleep(pause.seconds)

    async def cut(self) -> None:
        """Interrupt every flow, those of other tasks too. Only ``run_last`` works from now on."""
        await self._breakable.cut()

    async def run_last(self, flow: Flow[T]) -> T:
        """Run ``flow`` after ``cut`` and return its result."""
        return await _drive_awaited(flow, self._send, lambda pause: asyncio.sleep(pause.seconds))

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _send(self, call: Call) -> ServerReply | Lost:
        try:
            return reply_of(await self._http.request(call.method, call.path, **request_of(call)))
        except httpx.RequestError as error:
            return lost_by(error)


async def _drive_awaited(
    flow: Flow[T], ask: Callable[[Call], Awaitable[ServerReply | Lost]], pause: Callable[[Pause], Awaitable[object]]
) -> T:
    answer: Any = None
    try:
        while True:
            effect = flow.send(answer)
            match effect:
                case Call():
                    answer = await ask(effect)
                case Pause():
                    answer = await pause(effect)
                case Work():
                    answer = await asyncio.to_thread(effect.function)
    except StopIteration as stop:
        result: T = stop.value
        return result
    finally:
        flow.close()


class AsyncBackground:
    """Runs a flow in a task until the flow ends or is stopped."""

    def __init__(self, transport: AsyncTransport, flow: Flow[None], name: str) -> None:
        self._woken = asyncio.Event()
        self._task = asyncio.create_task(transport.run(flow, self._pause), name=name)

    async def _pause(self, pause: Pause) -> None:
        if not pause.is_wakeable:
            await asyncio.sleep(pause.seconds)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(pause.seconds):
                await self._woken.wait()
        self._woken.clear()  # after the wait, not before: a wake between two pauses ends the next one

    def wake(self) -> None:
        """End the current wakeable pause, or the next one."""
        self._woken.set()

    async def join(self, timeout_s: float | None = None) -> None:
        """Wait for the flow's end."""
        await asyncio.wait({self._task}, timeout=timeout_s)

    async def stop(self) -> None:
        """Cancel the flow, and wait until it has ended."""
        self._task.cancel()
        await asyncio.wait({self._task})
