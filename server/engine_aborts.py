"""Ending the engine calls of a run process that is gone: nobody reads their answers any more."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from forebay.core.ids import run_rid_prefix

logger = logging.getLogger(__name__)

AbortCalls = Callable[[str, str, float], Awaitable[object]]
"""Ends the calls of an engine (base URL) whose request ids have a prefix, within a time limit in seconds."""


class EngineAborts:
    """Aborts by the request-id prefix of a run, in the background, as well as it can be done.

    An engine is asked for ``timeout_s`` and given up after twice that.
    """

    def __init__(self, timeout_s: float, abort_calls: AbortCalls | None = None) -> None:
        self._timeout_s = timeout_s
        self._abort_calls = abort_calls or _abort_prefix
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, run_id: str, engine_urls: Sequence[str]) -> None:
        """Begin to abort the calls of ``run_id`` at every engine."""
        if engine_urls:
            task = asyncio.create_task(self._abort_all(run_id, engine_urls), name=f"abort {run_id}")
            self._tasks[run_id] = task
            task.add_done_callback(lambda _: self._tasks.pop(run_id, None))

    async def wait_for(self, run_id: str) -> None:
        """Return when no abort for ``run_id`` is under way: from then on its calls are safe."""
        if run_id in self._tasks:
            await asyncio.shield(self._tasks[run_id])

    async def wait_for_all(self) -> None:
        """Return when none is under way."""
        await asyncio.gather(*self._tasks.values())

    async def _abort_all(self, run_id: str, engine_urls: Sequence[str]) -> None:
        prefix = run_rid_prefix(run_id)
        await asyncio.gather(*(self._abort_one(url, prefix) for url in engine_urls))

    async def _abort_one(self, url: str, prefix: str) -> None:
        try:
            async with asyncio.timeout(2 * self._timeout_s):
                await self._abort_calls(url, prefix, self._timeout_s)
        except Exception as error:  # noqa: BLE001 -- an engine of any make, perhaps gone; its calls have time limits
            logger.warning("calls %s* at %s could not be aborted: %r", prefix, url, error)


async def _abort_prefix(base_url: str, rid_prefix: str, timeout_s: float) -> object:
    from forebay.engines.aborts import abort_prefix

    return await abort_prefix(base_url, rid_prefix, timeout_s=timeout_s)
