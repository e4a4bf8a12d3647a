"""A call between its submission and its last piece, bound to the client that waits for it."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager

from fastapi import Request

from forebay.engines.tiny.calls import Call
from forebay.engines.tiny.choice import Choice
from forebay.engines.tiny.service import Service


@contextmanager
def running(service: Service, request: Request, calls: Sequence[Call]) -> Iterator[None]:
    """Submit the calls; a client that goes away ends them, and so does leaving the block."""

    def cancel() -> None:
        for call in calls:
            service.thread.cancel(call)

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        cancel()

    rids = {call.rid for call in calls}
    service.rids |= rids
    for call in calls:
        service.thread.submit(call)
    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        service.rids -= rids
        watcher.cancel()
        cancel()


async def collect(call: Call) -> list[Choice]:
    """Every choice, once all have ended."""
    choices = [Choice() for _ in range(call.n)]
    async for piece in call.read():
        choices[piece.index].add(piece)
    return choices


async def growing(call: Call) -> AsyncIterator[tuple[int, Choice]]:
    """A choice and its place, whenever it has grown."""
    choices = [Choice() for _ in range(call.n)]
    async for piece in call.read():
        choices[piece.index].add(piece)
        yield piece.index, choices[piece.index]
