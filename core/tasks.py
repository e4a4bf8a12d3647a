"""Background tasks, kept until they end."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class TaskSet:
    """Tasks that were started and have not ended."""

    def __init__(self) -> None:
        # The event loop itself keeps only weak references, so a running task could be garbage-collected.
        self._running: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run ``work`` in its own task. Its exceptions are raised where the task is awaited."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def drain(self) -> None:
        """Wait until no task is left, including tasks started meanwhile. Raises none of their exceptions."""
        # Tasks may start others, even during this wait.
        while self._running:
            await asyncio.wait(self._running)

    async def cancel(self) -> None:
        """Cancel all tasks and wait until they have ended. Raises none of their exceptions."""
        for task in tuple(self._running):
            task.cancel()
        await self.drain()
