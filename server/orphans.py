"""What processes below the server leave behind when they are killed: the server is its parent from then on."""

import asyncio
import logging
from typing import Self

from forebay.core.child_process import adopt_orphans, dead_children, reap
from forebay.core.tasks import TaskSet

logger = logging.getLogger(__name__)

EVERY_S = 3.0


class Orphans:
    """Adopts them, and waits for those that have ended, so that none stays a zombie. Enter it with ``async with``.

    Whoever started a process ends what is left of its session (``end_session``). What made itself a session of its own
    goes on.
    """

    def __init__(self, every_s: float = EVERY_S) -> None:
        self._every_s = every_s
        self._tasks = TaskSet()

    async def __aenter__(self) -> Self:
        adopt_orphans()
        self._tasks.start(self._keep_reaping())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.cancel()

    async def _keep_reaping(self) -> None:
        before: set[int] = set()
        while True:
            await asyncio.sleep(self._every_s)
            dead = await asyncio.to_thread(dead_children)
            # The event loop waits for those that it started, and has done so by the second look: these are others.
            for pid in dead & before:
                reap(pid)
                logger.debug("process %d, which another had left behind, has ended", pid)
            before = dead
