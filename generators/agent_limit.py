"""An agent's time, which stands still while its run is held, or its engines are paused."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from forebay.generators.hold import Hold

LOOK_S = 1.0
"""How often time is counted. Of the seconds before a standstill, so many may be left out."""


@asynccontextmanager
async def wall_limit(hold: Hold, limit_s: float) -> AsyncIterator[asyncio.Timeout]:
    """``asyncio.timeout`` after ``limit_s`` seconds in which engine calls may go out."""
    async with asyncio.timeout(None) as limit:
        counting = asyncio.create_task(_end(limit, hold, limit_s))
        try:
            yield limit
        finally:
            counting.cancel()


@asynccontextmanager
async def set_at_limit(hold: Hold, limit_s: float) -> AsyncIterator[asyncio.Event]:
    """An event that is set at the same time."""
    over = asyncio.Event()
    counting = asyncio.create_task(_set(over, hold, limit_s))
    try:
        yield over
    finally:
        counting.cancel()


async def _end(limit: asyncio.Timeout, hold: Hold, limit_s: float) -> None:
    await _worked(hold, limit_s)
    limit.reschedule(asyncio.get_running_loop().time())


async def _set(over: asyncio.Event, hold: Hold, limit_s: float) -> None:
    await _worked(hold, limit_s)
    over.set()


async def _worked(hold: Hold, left_s: float) -> None:
    now_s = asyncio.get_running_loop().time
    while left_s > 0:
        await hold.wait_call()
        began_s = now_s()
        await asyncio.sleep(min(left_s, LOOK_S))
        if hold.may_call:
            left_s -= now_s() - began_s
