"""Sends stored bodies to a socket without passing them through the event loop.

Each body is verified before its first byte is sent, while earlier bodies are being sent. Short bodies
are sent from the memory in which they were verified, many per call; long ones use ``sendfile``. Both release the
interpreter's lock meanwhile.
"""

import select
import socket
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import NamedTuple

from forebay.buffer.store.abc import Edited, Outbound, Slice, stretches
from forebay.buffer.store.bodies import STRETCH_BYTES, BodyReader, Scratch, parts, read_for, unreadable
from forebay.core.records.disk_files import MAX_BUFFERS, BytesLike, ReadFile, behind

PATIENCE_MS = 50
"""Milliseconds that a thread waits for a full socket before the event loop waits instead."""


class _FileSpan(NamedTuple):
    """``length`` bytes of a segment from ``offset``."""

    segment: int
    file: ReadFile
    offset: int
    length: int


_Step = list[BytesLike] | _FileSpan
"""Data for one call, or for as many as the socket needs."""


class BodyTransfer:
    """A transfer of ``pieces``. ``go`` may be called from different threads, one at a time."""

    def __init__(self, reader: BodyReader, pieces: Sequence[Outbound]) -> None:
        self._reader = reader
        self._steps = self._make_steps(pieces)
        self._left: _Step | None = None
        self._next: _Step | None = None
        self._files: dict[int, ReadFile] = {}
        self._scratches = cycle((Scratch(), Scratch()))
        """Used alternately: while one step is sent, the next one is made."""
        self._is_stopped = False

    def stop(self) -> None:
        """Make ``go`` return soon, whatever is left to send."""
        self._is_stopped = True

    def close(self) -> None:
        """Close the files and free the memory: an error handler may keep this object alive."""
        self._left = self._next = None
        self._steps, self._scratches = iter(()), cycle((Scratch(),))
        for file in self._files.values():
            file.close()
        self._files.clear()

    def go(self, connection: socket.socket) -> bool:
        """Continue sending; return whether everything is sent. If not, the socket is full for now.

        Raises ``StorageFailed``, and ``ConnectionError`` if the client has disconnected.
        """
        while not self._is_stopped:
            step = self._left or self._made_next()
            if step is None:
                return True
            self._left = self._send(connection, step)
            if self._left:
                self._next = self._made_next()  # the receiver is busy meanwhile
                if not _takes_more(connection):
                    return False
        return False

    def _made_next(self) -> _Step | None:
        made, self._next = self._next or next(self._steps, None), None
        return made

    def _send(self, connection: socket.socket, step: _Step) -> _Step | None:
        """Send ``step`` and return what is left of it."""
        try:
            if isinstance(step, _FileSpan):
                return _send_span(connection, step)
            # MSG_MORE: the kernel waits for the next step before it sends a partial packet.
            num_bytes = connection.sendmsg(step[:MAX_BUFFERS], [], socket.MSG_MORE)
            return behind(step, num_bytes) or None
        except BlockingIOError:
            return step
        except TimeoutError as error:  # the kernel closed the connection
            raise ConnectionAbortedError(str(error)) from error

    # --- what to send

    def _make_steps(self, pieces: Sequence[Outbound]) -> Iterator[_Step]:
        for stretch, num_bytes in stretches(pieces, _num_read, STRETCH_BYTES):
            if num_bytes <= STRETCH_BYTES:
                yield self._loaded(stretch)
            else:  # a longer piece is alone
                yield from self._steps_of(stretch[0])

    def _loaded(self, pieces: Sequence[Outbound]) -> list[BytesLike]:
        regions = self._reader.load(pieces, next(self._scratches), may_wait=True)
        assert regions is not None, "a load that may wait returns everything"
        return list(parts(pieces, regions))

    def _steps_of(self, piece: Outbound) -> Iterator[_Step]:
        if not isinstance(piece, Edited | Slice):
            yield [piece]
            return
        if isinstance(piece, Edited) or not piece.is_proved:
            self._reader.prove_long(piece.location)
        if isinstance(piece, Slice):
            yield self._span(piece, piece.start, piece.stop)
        else:
            yield self._span(piece, 0, piece.start)
            yield [piece.text]
            yield self._span(piece, piece.stop, piece.location.length)
            yield [b","]

    def _span(self, piece: Slice | Edited, start: int, stop: int) -> _FileSpan:
        segment, offset = piece.location.segment, piece.location.offset
        return _FileSpan(segment, self._file(segment), offset + start, stop - start)

    def _file(self, segment: int) -> ReadFile:
        if segment not in self._files:
            self._files[segment] = self._reader.open(segment)
        return self._files[segment]


def _num_read(piece: Outbound) -> int:
    return read_for(piece).length if isinstance(piece, Edited | Slice) else len(piece)


def _send_span(connection: socket.socket, span: _FileSpan) -> _FileSpan | None:
    try:
        num_bytes = span.file.send_to(connection.fileno(), span.offset, span.length)
    except (BlockingIOError, ConnectionError, TimeoutError):
        raise
    except OSError as error:
        raise unreadable(span.segment, error) from error
    if num_bytes == span.length:
        return None
    if num_bytes == 0:
        raise unreadable(span.segment, f"it ends before byte {span.offset + span.length}")
    return span._replace(offset=span.offset + num_bytes, length=span.length - num_bytes)


def _takes_more(connection: socket.socket) -> bool:
    # Not `select`, which does not support descriptors above 1 023.
    waiting = select.poll()
    waiting.register(connection, select.POLLOUT)
    return bool(waiting.poll(PATIENCE_MS))
