"""A call between its submission and its last piece, bound to the client that waits for it."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from forebay.engines.tiny.calls import Call
from forebay.engines.tiny.reply_bodies import Choice
from forebay.engines.tiny.service import Service


@contextmanager
def running(service: Service, request: Request, calls: Sequence[Call]) -> Iterator[None]:
    """Submit the calls; a client that goes away ends them, and so does leaving the block, which frees their ids."""

    def cancel() -> None:
        for call in calls:
            service.thread.cancel(call)

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        cancel()

    for call in calls:
        service.thread.submit(call)
    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        service.release(calls)
        watcher.cancel()
        cancel()


class CallStream(StreamingResponse):
    """The events of a call. Its id is free after them, also where the client went away before the first."""

    def __init__(self, events: AsyncIterator[str], service: Service, call: Call) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._service = service
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._service.release([self._call])


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
