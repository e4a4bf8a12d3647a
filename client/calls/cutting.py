"""Calls that are broken off from outside: those of other threads, and those of other tasks."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any
from weakref import WeakSet

from forebay.client.errors import ClientClosed

CUT_S = 2.0
"""Seconds for tasks to close their connections."""
CONNECTED = ("connect_tcp.complete", "start_tls.complete")


class Connections:
    """Those of a transport that blocks."""

    # A thread that waits for an answer cannot be interrupted, and does not notice that its socket is closed; it does
    # notice that the connection is shut down, and so does the server.

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: WeakSet[Any] = WeakSet()
        self._cut = threading.Event()

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """For a request's extension of this name: ``httpcore`` tells what it does, with the connections it makes."""
        if not event.endswith(CONNECTED):
            return
        with self._lock:
            self._streams.add(info["return_value"])
            if self._cut.is_set():  # it was being connected while the others were cut
                _shut_down(info["return_value"])

    def cut(self) -> None:
        """Break off all that is under way, also what is only being connected."""
        with self._lock:
            self._cut.set()
            for stream in self._streams:
                _shut_down(stream)

    def check(self) -> None:
        """Raise ``ClientClosed`` once they were cut."""
        if self._cut.is_set():
            raise ClientClosed

    def pause(self, seconds: float) -> None:
        """Sleep, but no longer than until they are cut."""
        self._cut.wait(seconds)


def _shut_down(stream: Any) -> None:
    connection = stream.get_extra_info("socket")
    with suppress(OSError):  # closed already, or its place was taken by the one with TLS
        socket.socket.shutdown(connection, socket.SHUT_RDWR)  # that of TLS would first go on in plain text


class Breakable:
    """Parts of tasks that are broken off without cancelling the tasks."""

    def __init__(self) -> None:
        self._limits: set[asyncio.Timeout] = set()
        self._idle = asyncio.Event()
        self._is_cut = False

    @asynccontextmanager
    async def part(self) -> AsyncIterator[None]:
        """What is done inside raises ``ClientClosed`` when it is cut."""
        self.check()
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._limits.add(limit)
                yield
        except TimeoutError:
            self.check()  # the limit has no time of its own: it runs out by ``cut`` alone
            raise  # and this one came from inside
        finally:
            self._limits.discard(limit)
            if not self._limits:
                self._idle.set()

    async def cut(self) -> None:
        """Break off all that is under way, and wait until its connections are closed."""
        self._is_cut = True
        self._idle.clear()
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(0.0)  # a time that is over: each part ends at its next step of the event loop
        if self._limits:
            with suppress(TimeoutError):
                async with asyncio.timeout(CUT_S):
                    await self._idle.wait()

    def check(self) -> None:
        """Raise ``ClientClosed`` once they were cut."""
        if self._is_cut:
            raise ClientClosed
