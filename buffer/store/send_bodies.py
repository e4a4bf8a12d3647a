"""Stored bodies on their way to a socket, without passing through the event loop.

Each body is proved before its first byte goes out, the next ones while those before them are on their way. Short ones
are sent, many to a call, out of the memory in which they were proved; long ones go by ``sendfile``. Both let go of the
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
"""How long a thread waits for a socket that takes no more, before the event loop waits for it."""


class _FileSpan(NamedTuple):
    """``length`` bytes of a segment from ``offset`` on."""

    segment: int
    file: ReadFile
    offset: int
    length: int


_Step = list[BytesLike] | _FileSpan
"""What is sent with one call, or with as many as the socket wants."""


class BodyTransfer:
    """``pieces`` on their way. ``go`` may be called from another thread each time, by one at a time."""

    def __init__(self, reader: BodyReader, pieces: Sequence[Outbound]) -> None:
        self._reader = reader
        self._steps = self._make_steps(pieces)
        self._left: _Step | None = None
        self._next: _Step | None = None
        self._files: dict[int, ReadFile] = {}
        self._scratches = cycle((Scratch(), Scratch()))
        """By turns: while one step is sent, the next one is made."""
        self._is_stopped = False

    def stop(self) -> None:
        """Let ``go`` return soon, with whatever is not sent yet."""
        self._is_stopped = True

    def close(self) -> None:
        """Give the files back, and the memory: whoever handles an error may keep this object alive."""
        self._left = self._next = None
        self._steps, self._scratches = iter(()), cycle((Scratch(),))
        for file in self._files.values():
            file.close()
        self._files.clear()

    def go(self, connection: socket.socket) -> bool:
        """Send on; whether that was all. Otherwise the socket takes no more for the moment.

        Raises ``StorageFailed``, and ``ConnectionError`` if nobody is there any more.
        """
        while not self._is_stopped:
            step = self._left or self._made_next()
            if step is None:
                return True
            self._left = self._send(connection, step)
            if self._left:
                self._next = self._made_next()  # the receiver has enough to do meanwhile
                if not _takes_more(connection):
                    return False
        return False

    def _made_next(self) -> _Step | None:
        made, self._next = self._next or next(self._steps, None), None
        return made

    def _send(self, connection: socket.socket, step: _Step) -> _Step | None:
        """What is left of ``step``."""
        try:
            if isinstance(step, _FileSpan):
                return _send_span(connection, step)
            # MSG_MORE: the kernel waits for the next step before it sends a packet that is not full.
            num_bytes = connection.sendmsg(step[:MAX_BUFFERS], [], socket.MSG_MORE)
            return behind(step, num_bytes) or None
        except BlockingIOError:
            return step
        except TimeoutError as error:  # the kernel gave the connection up
            raise ConnectionAbortedError(str(error)) from error

    # --- what to send

    def _make_steps(self, pieces: Sequence[Outbound]) -> Iterator[_Step]:
        for stretch, num_bytes in stretches(pieces, _num_read, STRETCH_BYTES):
            if num_bytes <= STRETCH_BYTES:
                yield self._loaded(stretch)
            else:  # one that is longer stands alone
                yield from self._steps_of(stretch[0])

    def _loaded(self, pieces: Sequence[Outbound]) -> list[BytesLike]:
        regions = self._reader.load(pieces, next(self._scratches), may_wait=True)
        assert regions is not None, "whoever may wait gets it all"
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
    # Not `select`: it knows no descriptor above 1 023.
    waiting = select.poll()
    waiting.register(connection, select.POLLOUT)
    return bool(waiting.poll(PATIENCE_MS))
