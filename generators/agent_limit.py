"""An agent's time, which stands still while its run is held, or its engines are paused."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from forebay.generators.hold import Hold

LOOK_S = 1.0
"""How often time is counted. Of the seconds before a standstill, so many may be left out."""


@asynccontextmanager
async def wall_limit(hold: Hold, limit_s: float) -> AsyncIterator[asyncio.Timeout]:
    """``asyncio.timeout`` after ``limit_s`` seconds in which engine calls may go out."""
    now_s = asyncio.get_running_loop().time
    async with asyncio.timeout(None) as limit, _counting(hold, limit_s, lambda: limit.reschedule(now_s())):
        yield limit


@asynccontextmanager
async def set_at_limit(hold: Hold, limit_s: float) -> AsyncIterator[asyncio.Event]:
    """An event that is set at the same time."""
    over = asyncio.Event()
    async with _counting(hold, limit_s, over.set):
        yield over


@asynccontextmanager
async def _counting(hold: Hold, limit_s: float, at_limit: Callable[[], None]) -> AsyncIterator[None]:
    counting = asyncio.create_task(_count(hold, limit_s, at_limit))
    try:
        yield
    finally:
        counting.cancel()


async def _count(hold: Hold, left_s: float, at_limit: Callable[[], None]) -> None:
    now_s = asyncio.get_running_loop().time
    while left_s > 0:
        await hold.wait_call()
        began_s = now_s()
        await asyncio.sleep(min(left_s, LOOK_S))
        if hold.may_call:
            left_s -= now_s() - began_s
    at_limit()
