"""Weight versions of the workers: SGLang does not report them in a stream, so streams share separate requests."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

FRESH_S = 0.1
"""Maximum age of a version used at the beginning of a stream."""
TOGETHER_S = 0.02
"""Streams that end within this time share one request."""

Ask = Callable[[str], Awaitable[str | None]]


@dataclass
class _Worker:
    version: str | None = None
    asked_s: float = float("-inf")
    """When the newest answered request was sent."""
    announced: int | None = None
    """The trainer's latest announcement at that time."""
    asking: asyncio.Task[None] | None = None
    """A request in flight."""
    next_asking: asyncio.Task[None] | None = None
    """A request about to be sent."""


@dataclass
class WorkerVersions:
    """Assumes that a version that is the same before and after a stream did not change in between.

    The version *before* a stream may therefore be old, because it is requested again *after* the stream: if an update
    falls in between, both are recorded. A fresh version is used so that this does not affect streams that begin soon
    after an update.
    """

    ask: Ask
    """Return the current version of the worker at a URL; None if it has none."""
    _workers: defaultdict[str, _Worker] = field(default_factory=lambda: defaultdict(_Worker))

    async def before(self, url: str, announced: int | None) -> str | None:
        """Return the version at the start of a request. ``announced`` is the trainer's latest announcement."""
        worker = self._workers[url]
        is_fresh = worker.version is not None and time.monotonic() - worker.asked_s < FRESH_S
        if not is_fresh or worker.announced != announced:
            if worker.asking is None:
                worker.asking = asyncio.create_task(self._ask(url, worker, announced))
            await asyncio.shield(worker.asking)  # others also wait for it, and this stream may be cancelled
        return worker.version

    async def after(self, url: str, announced: int | None) -> str | None:
        """Return the version at some moment after this call."""
        worker = self._workers[url]
        if worker.next_asking is None:
            worker.next_asking = asyncio.create_task(self._ask_soon(url, worker, announced))
        await asyncio.shield(worker.next_asking)
        return worker.version

    async def _ask_soon(self, url: str, worker: _Worker, announced: int | None) -> None:
        await asyncio.sleep(TOGETHER_S)
        worker.next_asking = None  # callers from now on need another request
        worker.asking = asyncio.create_task(self._ask(url, worker, announced))
        await worker.asking

    async def _ask(self, url: str, worker: _Worker, announced: int | None) -> None:
        asked_s = time.monotonic()
        try:
            version = await self.ask(url)
        finally:
            worker.asking = None
        # Requests of ``before`` and ``after`` may overlap, and the later one may be answered first.
        if asked_s > worker.asked_s:
            worker.version, worker.asked_s, worker.announced = version, asked_s, announced
