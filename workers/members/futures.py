"""Futures that have failed already, those that end as others do, and waiting for one of another thread."""

import asyncio
from concurrent.futures import Future
from typing import Any

from forebay.workers.members.worker_errors import WorkerError


def failed_future(error: BaseException) -> "Future[Any]":
    """One that has ended with this."""
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


def follow(inner: "Future[Any]", outer: "Future[Any]") -> None:
    """Have ``outer`` end as ``inner`` does, and cancel that when it is cancelled itself."""

    def ended(inner: "Future[Any]") -> None:
        if not outer.set_running_or_notify_cancel():
            return
        if inner.cancelled():
            outer.set_exception(WorkerError("the call was cancelled"))
        elif (error := inner.exception()) is not None:
            outer.set_exception(error)
        else:
            outer.set_result(inner.result())

    outer.add_done_callback(lambda ended: inner.cancel() if ended.cancelled() else None)
    inner.add_done_callback(ended)


def copied(inner: "Future[Any]") -> "Future[Any]":
    """A future that ends as ``inner`` does, for somebody who may cancel it: ``inner`` goes on."""
    outer: Future[Any] = Future()
    inner.add_done_callback(lambda ended: follow(ended, outer))
    return outer


async def when_ended(future: "Future[Any]") -> None:
    """Return when a future of another thread has ended, in whatever way."""
    loop, event = asyncio.get_running_loop(), asyncio.Event()
    future.add_done_callback(lambda _: loop.call_soon_threadsafe(event.set))
    await event.wait()
