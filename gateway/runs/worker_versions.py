"""Which weights the workers have: SGLang does not say it in a stream, so one stream asks for all others."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

FRESH_S = 0.1
"""So old may an answer be that a stream begins with."""
TOGETHER_S = 0.02
"""Streams that end within it are answered by one request."""

Ask = Callable[[str], Awaitable[str | None]]


@dataclass
class _Worker:
    version: str | None = None
    asked_s: float = float("-inf")
    """When the newest request that was answered was sent."""
    announced: int | None = None
    """What the trainer had announced then."""
    asking: asyncio.Task[None] | None = None
    """A request that was sent."""
    next_asking: asyncio.Task[None] | None = None
    """One that is to be sent."""


@dataclass
class WorkerVersions:
    """A version that is the same before and after a stream was the same all the time.

    So what is known *before* may be old, as long as it was true once and is asked for again *after* the stream: if an
    update falls in between, both are recorded. A fresh one is taken so that this does not happen to streams that begin
    soon after an update.
    """

    ask: Ask
    """The version of the worker at a URL now; None if it has none."""
    _workers: defaultdict[str, _Worker] = field(default_factory=lambda: defaultdict(_Worker))

    async def before(self, url: str, announced: int | None) -> str | None:
        """The version that a request finds which is sent now. ``announced`` is what the trainer announced last."""
        worker = self._workers[url]
        is_fresh = worker.version is not None and time.monotonic() - worker.asked_s < FRESH_S
        if not is_fresh or worker.announced != announced:
            if worker.asking is None:
                worker.asking = asyncio.create_task(self._ask(url, worker, announced))
            await asyncio.shield(worker.asking)  # others wait for it too: this stream may be cancelled
        return worker.version

    async def after(self, url: str, announced: int | None) -> str | None:
        """The version at some moment after now."""
        worker = self._workers[url]
        if worker.next_asking is None:
            worker.next_asking = asyncio.create_task(self._ask_soon(url, worker, announced))
        await asyncio.shield(worker.next_asking)
        return worker.version

    async def _ask_soon(self, url: str, worker: _Worker, announced: int | None) -> None:
        await asyncio.sleep(TOGETHER_S)
        worker.next_asking = None  # whoever comes from here on needs another one
        worker.asking = asyncio.create_task(self._ask(url, worker, announced))
        await worker.asking

    async def _ask(self, url: str, worker: _Worker, announced: int | None) -> None:
        asked_s = time.monotonic()
        try:
            version = await self.ask(url)
        finally:
            worker.asking = None
        # Two requests can be under way, from ``before`` and from ``after``; the later one may be answered first.
        if asked_s > worker.asked_s:
            worker.version, worker.asked_s, worker.announced = version, asked_s, announced
