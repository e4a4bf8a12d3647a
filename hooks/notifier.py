"""Notifications wait in a bounded queue, so that whoever reports an event never waits."""

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from forebay.core.errors import HookFailed

logger = logging.getLogger(__name__)

_MAX_WAITING = 1_000


class Notifier:
    """Passes events on, in order. What finds the queue full is dropped, and that is logged."""

    def __init__(self, deliver: Callable[[str, bytes], Awaitable[None]]) -> None:
        self._deliver = deliver
        self._waiting: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue(_MAX_WAITING)
        self._num_dropped = 0
        self._task: asyncio.Task[None] | None = None

    def put(self, event: str, payload: dict[str, Any]) -> None:
        """Queue an event; ``payload`` values that are not JSON go as their ``str``. Needs a running event loop."""
        if self._task is None:  # only now: of thousands of runs, few have anything to deliver
            self._task = asyncio.create_task(self._run())
        try:
            self._waiting.put_nowait((event, json.dumps(payload, default=str).encode()))
        except asyncio.QueueFull:
            self._num_dropped += 1
            # Once: the log would fill as fast as the queue did. Their number is logged at the end.
            if self._num_dropped == 1:
                logger.warning("plugins are slower than events come: notifications are being dropped")
        except Exception:  # a notification must not break what it reports, whatever the payload
            logger.exception("notification %s could not be encoded", event)

    async def close(self, grace_s: float) -> None:
        """Deliver what is queued, for at most ``grace_s`` seconds, and stop."""
        if self._task is None:
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._waiting.join(), grace_s)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._num_dropped:
            logger.warning("%d notifications were dropped", self._num_dropped)

    async def _run(self) -> None:
        while True:
            event, payload = await self._waiting.get()
            try:
                await self._deliver(event, payload)
            except HookFailed as error:
                logger.warning("%s\n%s", error, error.traceback)
            finally:
                self._waiting.task_done()
