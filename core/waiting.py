"""Waiting for a change, or for one result, within one event loop."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


def finish(future: "asyncio.Future[ResultT]", result: ResultT, error: Exception | None) -> None:
    """Set a future's result, or its error if there is one; ignores a cancelled future."""
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
        future.exception()  # prevents asyncio's warning about an exception that was never retrieved


@asynccontextmanager
async def timeout_when(event: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.Timeout]:
    """``asyncio.timeout`` that expires when ``event`` returns."""
    # Cancelling the task itself would look like the end of the process.
    async with asyncio.timeout(None) as limit:

        async def watch() -> None:
            await event
            limit.reschedule(asyncio.get_running_loop().time())

        watching = asyncio.create_task(watch())
        watching.add_done_callback(lambda _: event.close())  # a task cancelled at once never starts it
        try:
            yield limit
        finally:
            watching.cancel()


class Signal:
    """``notify`` wakes all current waiters; later waiters wait for the next call."""

    def __init__(self) -> None:
        self.count = 0
        """Number of notifications so far. Comparing it before waiting ensures that none is missed."""
        # A dict, because it keeps the order of arrival, in which waiters are woken.
        self._waiters: dict[asyncio.Future[None], None] = {}
        self._is_closed = False

    @property
    def has_waiters(self) -> bool:
        return bool(self._waiters)

    def notify(self) -> None:
        """Wake all waiters, in order of arrival."""
        self.count += 1
        for waiter in self._waiters:
            # A waiter that timed out in this turn of the event loop is done, but not removed yet.
            if not waiter.done():
                waiter.set_result(None)

    def close(self) -> None:
        """Wake all waiters, and let later ones return at once."""
        self._is_closed = True
        self.notify()

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the next ``notify``, at most ``timeout_s`` seconds if given; return whether it happened."""
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
