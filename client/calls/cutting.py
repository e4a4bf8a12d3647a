"""Interrupting the calls of other threads."""

import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from weakref import WeakSet

from forebay.client.errors import ClientClosed

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
