"""Waking those who wait for news, or for one result, within one event loop."""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


def finish(future: "asyncio.Future[ResultT]", result: ResultT, error: Exception | None) -> None:
    """Give a future its result or, if there is one, the error; one that was cancelled is left alone."""
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
        future.exception()  # whoever does not wait for it must not find it in the log as never retrieved


@asynccontextmanager
async def timeout_when(event: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.Timeout]:
    """``asyncio.timeout`` that expires once ``event`` returns."""
    # To cancel the task itself would look like the end of the process.
    async with asyncio.timeout(None) as limit:

        async def watch() -> None:
            await event
            limit.reschedule(asyncio.get_running_loop().time())

        watching = asyncio.create_task(watch())
        watching.add_done_callback(lambda _: event.close())  # a task that is cancelled at once never starts it
        try:
            yield limit
        finally:
            watching.cancel()


class Signal:
    """``notify`` wakes everybody who waits now; whoever waits later waits for the next time."""

    def __init__(self) -> None:
        self.count = 0
        """Number of notifications so far: who compares it before waiting cannot miss one."""
        # A dict for its order, which a set has not: who came first is woken first.
        self._waiters: dict[asyncio.Future[None], None] = {}
        self._is_closed = False

    @property
    def has_waiters(self) -> bool:
        return bool(self._waiters)

    def notify(self) -> None:
        """Wake all waiters, in the order in which they came."""
        self.count += 1
        for waiter in self._waiters:
            # One whose time ran out in this round of the event loop is done, and has not yet taken itself out.
            if not waiter.done():
                waiter.set_result(None)

    def close(self) -> None:
        """Wake all waiters, and let nobody wait any more."""
        self._is_closed = True
        self.notify()

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the next ``notify``, at most ``timeout_s`` seconds if they are given; whether it came."""
        if self._is_closed:
            return False
        waiter = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        try:
            async with asyncio.timeout(timeout_s):
                await waiter
        except TimeoutError:
            return False
        else:
            return True
        finally:
            self._waiters.pop(waiter, None)


class Deadline:
    """Seconds that are used up from now on, by one wait or by several together."""

    def __init__(self, wait_s: float) -> None:
        self._until_s = time.monotonic() + wait_s

    @property
    def left_s(self) -> float:
        """Never less than 0."""
        return max(0.0, self._until_s - time.monotonic())

    async def wait(self, signal: Signal) -> bool:
        """Wait for ``signal``; False once the time is used up."""
        return self.left_s > 0 and await signal.wait(self.left_s)
