"""Copies of generators that no run needs any more: they go with the last body of a run that has ended."""

import asyncio
import logging
from typing import Self

from forebay.buffer.buffer import Buffer
from forebay.core.errors import ForebayError
from forebay.core.tasks import TaskSet
from forebay.server.runs.folders import RunFolders

EVERY_S = 10.0

logger = logging.getLogger(__name__)


class CodeCopies:
    """Looks for them from time to time. Enter it with ``async with``.

    While there is a body, a rewind may bring it back, and a read then asks the run's hooks. A run that is resumed gets
    another copy.
    """

    def __init__(self, buffer: Buffer, folders: RunFolders, every_s: float = EVERY_S) -> None:
        self._buffer = buffer
        self._folders = folders
        self._every_s = every_s
        self._tasks = TaskSet()

    async def __aenter__(self) -> Self:
        self._tasks.start(self._keep_removing())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.cancel()

    async def remove_unneeded(self) -> None:
        """Remove the copies of each run at rest that has no body left. Raises ``StorageFailed``, OSError."""
        while self._buffer.at_rest:
            entry = self._buffer.get(self._buffer.at_rest.pop())
            run = entry.run
            if not entry.buffer.is_exhausted or not await asyncio.to_thread(self._folders.has_code, run):
                continue
            has_bodies = await self._buffer.store.has_bodies(run.run_id)
            # Asked again: it may have been resumed or rewound meanwhile.
            if not has_bodies and entry.buffer.is_exhausted:
                await self._folders.remove_code(run)
                logger.debug("run %s: its copy of the generator is removed", run.run_id)

    async def _keep_removing(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            try:
                await self.remove_unneeded()
            except (ForebayError, OSError) as error:
                logger.warning("code that no run needs any more cannot be removed for now: %s", error)
                self._buffer.at_rest.update(entry.run.run_id for entry in self._buffer.entries)
