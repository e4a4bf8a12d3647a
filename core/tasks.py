"""Tasks that run beside their starter, kept until they end."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class TaskSet:
    """The tasks that somebody has started and that have not ended."""

    def __init__(self) -> None:
        # The event loop itself keeps weak references only, and could lose a task in mid-work.
        self._running: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run ``work`` in a task of its own. What it raises is the business of whoever awaits the task."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def drain(self) -> None:
        """Wait until none is left, those started meanwhile included. Raises nothing of theirs."""
        # Tasks start others, also while the last ones are waited for.
        while self._running:
            await asyncio.wait(self._running)

    async def cancel(self) -> None:
        """Cancel all of them and wait until they have ended. Raises nothing of theirs."""
        for task in tuple(self._running):
            task.cancel()
        await self.drain()
