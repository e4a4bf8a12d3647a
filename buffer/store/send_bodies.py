"""Stored bodies on their way to a socket, without passing through the event loop.

Long stretches go from the page cache by ``sendfile``; short ones, many to a call, as parts of mapped files. Both leave
the copying to the kernel, and let go of the interpreter's lock meanwhile.
"""

import errno
import select
import socket
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from forebay.buffer.store.abc import Edited, Outbound, Slice
from forebay.buffer.store.bodies import BodyReader, edited_parts, read_span, unreadable
from forebay.buffer.store.files import MAX_BUFFERS, BytesLike, ReadFile, behind
from forebay.buffer.store.rows import Location
from forebay.core.chunking import stretches
from forebay.core.errors import BodyUnreadable

STRETCH_BYTES = 1 << 20
"""Of short pieces that are sent with one call."""
SHORT_BYTES = 48 << 10
"""Up to this size on average, pieces are sent together: a call for each would cost more than copying them."""
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


class Sending:
    """``pieces`` on their way. ``go`` may be called from another thread each time, by one at a time."""

    def __init__(self, reader: BodyReader, pieces: Sequence[Outbound]) -> None:
        self._reader = reader
        self._steps = self._make_steps(pieces)
        self._left: _Step | None = None
        self._next: _Step | None = None
        self._files: dict[int, ReadFile] = {}
        self._views: dict[int, memoryview] = {}
        self._is_stopped = False

    def stop(self) -> None:
        """Let ``go`` return soon, with whatever is not sent yet."""
        self._is_stopped = True

    def close(self) -> None:
        """Give the files back, and what was mapped of them: whoever handles an error may keep this object alive."""
        # A view that is alive keeps its mapping, and thus a removed segment's disk space.
        self._left = self._next = None
        self._steps = iter(())
        self._views.clear()
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
        except OSError as error:
            # The kernel copies from a mapped file: a page that the disk cannot read is a fault there, not a signal
            # here.
            if error.errno != errno.EFAULT:
                raise
            raise BodyUnreadable("a page of it is lost") from error

    # --- what to send

    def _make_steps(self, pieces: Sequence[Outbound]) -> Iterator[_Step]:
        for stretch, num_bytes in stretches(pieces, len, STRETCH_BYTES):
            if num_bytes <= SHORT_BYTES * len(stretch):
                yield self._views_of(stretch)
            else:
                for piece in stretch:
                    yield from self._steps_of(piece)

    def _views_of(self, pieces: Sequence[Outbound]) -> list[BytesLike]:
        """The pieces as parts of mapped files, of which the kernel copies what is sent."""
        made: list[BytesLike] = []
        segment, view, size = -1, memoryview(b""), 0
        for piece in pieces:
            if isinstance(piece, bytes | memoryview):
                made.append(piece)
                continue
            at = piece.location
            if at.segment != segment:
                segment, view = at.segment, self._view(at.segment)
                size = len(view)
            end = at.offset + (piece.stop if isinstance(piece, Slice) else at.length)
            # Sliced beyond its end, a view would be short without a word.
            if end > size:
                raise unreadable(segment, f"it ends before byte {end}")
            if isinstance(piece, Slice):
                made.append(view[at.offset + piece.start : end])
            else:
                made += edited_parts(piece, view, at.offset)
        return made

    def _view(self, segment: int) -> memoryview:
        if segment not in self._views:
            file = self._file(segment)
            try:
                self._views[segment] = file.view()
            except ValueError as error:  # an empty file cannot be mapped
                raise unreadable(segment, str(error)) from error
            except OSError as error:
                raise unreadable(segment, error) from error
        return self._views[segment]

    def _steps_of(self, piece: Outbound) -> Iterator[_Step]:
        if isinstance(piece, Slice):
            yield self._span(piece, piece.start, piece.stop)
        elif isinstance(piece, Edited):
            yield self._span(piece, 0, piece.start)
            yield from self._end_of(piece)
        elif piece:
            yield [piece]

    def _end_of(self, piece: Edited) -> Iterator[_Step]:
        """Everything behind the new text is mostly short, and goes with it."""
        rest = self._span(piece, piece.stop, piece.location.length)
        if rest.length <= SHORT_BYTES:
            yield [piece.text, read_span(rest.file, Location(rest.segment, rest.offset, rest.length)), b","]
        else:
            yield [piece.text]
            yield rest
            yield [b","]

    def _span(self, piece: Slice | Edited, start: int, stop: int) -> _FileSpan:
        segment, offset = piece.location.segment, piece.location.offset
        return _FileSpan(segment, self._file(segment), offset + start, stop - start)

    def _file(self, segment: int) -> ReadFile:
        if segment not in self._files:
            self._files[segment] = self._reader.open(segment)
        return self._files[segment]


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
