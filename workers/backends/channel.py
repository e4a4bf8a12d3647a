"""Messages over a socket between a controller and the process of a worker: a kind, a number, and frames of bytes."""

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
"""Fits into the socket wherever that says that it can be written to: Linux says so while a quarter is in use."""

SPEC, CALL, CANCEL, CLOSE = b"s", b"c", b"x", b"q"
"""To the worker."""
STARTED, OUTCOME, VITALS = b"S", b"O", b"V"
"""From the worker."""


class WorkerMessage(NamedTuple):
    """One message. Frames that were large enough are ``bytearray``, which arrays may be made of without a copy."""

    kind: bytes
    number: int
    frames: Sequence[Any]


class WorkerChannel:
    """One end of the socket: any thread sends, one receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._reader = io.BufferedReader(sock.makefile("rb", buffering=0), _BUFFERED)
        self._lock = threading.Lock()
        self.heard_s = time.monotonic()
        """When the last bytes came."""
        self.was_cut_short = False
        """Whether somebody was interrupted in the middle of a message, and could not go on."""

    def send(self, kind: bytes, number: int = 0, frames: Sequence[Any] = ()) -> None:
        """Send one message; returns when the system has all of it. Raises ``OSError`` if the other end is gone."""
        with self._lock:
            self._send(kind, number, frames)

    def send_at_leisure(self, kind: bytes, number: int, frames: Sequence[Any]) -> bool:
        """Send a message of up to ``SMALL_BYTES``, unless that had to wait for a sender, or for the other end to read.

        Whether it was sent.
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
        """The next message, or nothing when the other end is gone."""
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
        """Whether bytes wait to be received, so that it is not the other end that is silent."""
        try:
            return _is_ready(self._sock, select.POLLIN)
        except (OSError, ValueError):  # closed meanwhile
            return False

    def hang_up(self) -> None:
        """End both directions: whoever sends or receives in another thread stops waiting."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Free the descriptor; for the thread that receives, when it is done."""
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
        except BaseException as error:  # a Ctrl-C, too: the other end would take the next message for the rest of this
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
    asked = select.poll()  # select() takes no descriptor above 1023
    asked.register(sock, event)
    return bool(asked.poll(0))
