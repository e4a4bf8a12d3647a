"""Messages over a socket between a controller and a worker's process: a kind, a number, and frames of bytes."""

import io
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

_HEAD = struct.Struct("<cQI")
_PIECE = 1 << 20
_BUFFERED = 64 << 10
SMALL_BYTES = 64 << 10
"""A message of this size fits into any writable socket: Linux reports one as writable while a quarter is in use."""

SPEC, CALL, CANCEL, CLOSE = b"s", b"c", b"x", b"q"
"""Kinds of messages to the worker."""
STARTED, OUTCOME, VITALS = b"S", b"O", b"V"
"""Kinds of messages from the worker."""


class WorkerMessage(NamedTuple):
    """One message. Large frames are ``bytearray``, so that arrays can use them without a copy."""

    kind: bytes
    number: int
    frames: Sequence[Any]


class WorkerChannel:
    """One end of the socket. Any thread may send; one thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._reader = io.BufferedReader(sock.makefile("rb", buffering=0), _BUFFERED)
        self._lock = threading.Lock()
        self.heard_s = time.monotonic()
        """Monotonic time of the last received bytes."""
        self.was_cut_short = False
        """Whether a sender was interrupted in the middle of a message."""

    def send(self, kind: bytes, number: int = 0, frames: Sequence[Any] = ()) -> None:
        """Send one message. Returns when the system has all of it. Raises ``OSError`` if the other end is gone."""
        with self._lock:
            self._send(kind, number, frames)

    def send_at_leisure(self, kind: bytes, number: int, frames: Sequence[Any]) -> bool:
        """Send a message of up to ``SMALL_BYTES`` if that needs no wait for another sender or for the reader.

        Returns whether it was sent.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if not _is_ready(self._sock, select.POLLOUT):
                return False
            self._send(kind, number, frames)
        finally:
            self._lock.release()
        return True

    def receive(self) -> WorkerMessage | None:
        """Wait for the next message; None when the other end is gone."""
        head = self._read(_HEAD.size)
        if head is None:
            return None
        kind, number, num_frames = _HEAD.unpack(head)
        lengths = self._read(8 * num_frames)
        if lengths is None:
            return None
        frames: list[Any] = []
        for length in struct.unpack(f"<{num_frames}Q", lengths):
            frame = self._read(length)
            if frame is None:
                return None
            frames.append(frame)
        return WorkerMessage(kind, number, frames)

    def has_more(self) -> bool:
        """Whether unread bytes are waiting, which means that the other end is not silent."""
        try:
            return _is_ready(self._sock, select.POLLIN)
        except (OSError, ValueError):  # already closed
            return False

    def hang_up(self) -> None:
        """Shut down both directions, which wakes threads that send or receive."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Free the descriptor. The receiving thread calls this when it is done."""
        with self._lock:
            self._reader.close()
            self._sock.close()

    def _send(self, kind: bytes, number: int, frames: Sequence[Any]) -> None:
        views = [memoryview(frame).cast("B") for frame in frames]
        lengths = struct.pack(f"<{len(views)}Q", *(view.nbytes for view in views))
        parts = [memoryview(_HEAD.pack(kind, number, len(views)) + lengths), *views]
        if sum(view.nbytes for view in views) <= SMALL_BYTES:
            self._sock.sendall(b"".join(parts), socket.MSG_NOSIGNAL)
            return
        try:
            while parts:
                sent = self._sock.sendmsg(parts, [], socket.MSG_NOSIGNAL)
                while parts and sent >= parts[0].nbytes:
                    sent -= parts.pop(0).nbytes
                if parts:
                    parts[0] = parts[0][sent:]
        except BaseException as error:  # Ctrl-C, too: the next message would be read as the rest of this
            self.was_cut_short = not isinstance(error, OSError)
            self.hang_up()
            raise

    def _read(self, length: int) -> Any:
        if length <= _BUFFERED:
            try:
                taken = self._reader.read(length)
            except (OSError, ValueError):
                return None
            if len(taken) < length:
                return None
            self.heard_s = time.monotonic()
            return taken
        whole = bytearray(length)
        view, filled = memoryview(whole), 0
        while filled < length:
            try:
                got = self._reader.readinto(view[filled : filled + _PIECE])
            except (OSError, ValueError):
                return None
            if not got:
                return None
            filled += got
            self.heard_s = time.monotonic()
        return whole


def _is_ready(sock: socket.socket, event: int) -> bool:
    asked = select.poll()  # select() cannot handle descriptors above 1023
    asked.register(sock, event)
    return bool(asked.poll(0))
