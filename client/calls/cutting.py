"""Interrupting the calls of other threads and other tasks."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any
from weakref import WeakSet

from forebay.client.errors import ClientClosed

CUT_S = 2.0
"""Seconds that tasks have to close their connections."""
CONNECTED = ("connect_tcp.complete", "start_tls.complete")


class Connections:
    """The open connections of a blocking transport."""

    # A thread that waits for a reply cannot be interrupted and does not notice that its socket was closed. It does
    # notice a shutdown of the connection, and so does the server.

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: WeakSet[Any] = WeakSet()
        self._cut = threading.Event()

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Note new connections. The ``trace`` extension of a request: ``httpcore`` calls it at each of its steps."""
        if not event.endswith(CONNECTED):
            return
        with self._lock:
            self._streams.add(info["return_value"])
            if self._cut.is_set():  # it was still connecting when the others were cut
                _shut_down(info["return_value"])

    def cut(self) -> None:
        """Interrupt all calls in progress, those that are still connecting included."""
        with self._lock:
            self._cut.set()
            for stream in self._streams:
                _shut_down(stream)

    def check(self) -> None:
        """Raise ``ClientClosed`` if the connections were cut."""
        if self._cut.is_set():
            raise ClientClosed

    def pause(self, seconds: float) -> None:
        """Sleep for ``seconds``, or until the connections are cut."""
        self._cut.wait(seconds)


def _shut_down(stream: Any) -> None:
    connection = stream.get_extra_info("socket")
    with suppress(OSError):  # closed already, or replaced by the TLS socket
        socket.socket.shutdown(connection, socket.SHUT_RDWR)  # SSLSocket.shutdown would first drop to plain text


class Breakable:
    """Parts of tasks that can be interrupted without cancelling the tasks."""

    def __init__(self) -> None:
        self._limits: set[asyncio.Timeout] = set()
        self._idle = asyncio.Event()
        self._is_cut = False

    @asynccontextmanager
    async def part(self) -> AsyncIterator[None]:
        """Raise ``ClientClosed`` from the block when it is cut."""
        self.check()
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._limits.add(limit)
                yield
        except TimeoutError:
            self.check()  # this limit has no time of its own: only ``cut`` expires it
            raise  # the timeout came from inside the block
        finally:
            self._limits.discard(limit)
            if not self._limits:
                self._idle.set()

    async def cut(self) -> None:
        """Interrupt all parts in progress, and wait until their connections are closed."""
        self._is_cut = True
        self._idle.clear()
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(0.0)  # a time in the past: each part ends at its next step of the event loop
        if self._limits:
            with suppress(TimeoutError):
                async with asyncio.timeout(CUT_S):
                    await self._idle.wait()

    def check(self) -> None:
        """Raise ``ClientClosed`` after ``cut``."""
        if self._is_cut:
            raise ClientClosed
