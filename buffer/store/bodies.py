"""Reading bodies out of the segments: straight to where they are wanted, neighbours with one call."""

import errno
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from forebay.buffer.store.abc import Edited, Piece
from forebay.buffer.store.files import MAX_BUFFERS, BytesLike, Files, ReadFile
from forebay.buffer.store.log_segments import segment_path
from forebay.buffer.store.rows import Location
from forebay.core.errors import BodyUnreadable, StorageFailed

INLINE_BYTES = 1 << 20
"""Up to so much is copied from the page cache where the caller stands; a thread would cost more."""
SMALL_BYTES = 16 << 10
"""Bodies up to this size are read with their neighbours and copied once more: that costs less than a call for each."""
GAP_BYTES = 4 << 10
"""Neighbours so near are read together: copying what lies between costs less than a system call."""

DAMAGE = frozenset({errno.ENOENT, errno.EIO})
"""What a read of a file says that is gone, or that the disk has lost."""

_Wanted = tuple[int, int, int, Edited]
"""Segment and offset of a body; where its edited form goes in the result, or which piece it is; the edit itself."""


class _Regions(NamedTuple):
    """Stretches of one segment in memory, sorted: where each begins, and its bytes."""

    starts: list[int]
    views: list[memoryview]


class _Span(NamedTuple):
    """What one call reads: from ``start`` on, into ``buffers`` one after the other."""

    start: int
    end: int
    buffers: list[memoryview]


class BodyReader:
    """Bodies in the segments of ``directory``. Any thread may call it. Raises ``StorageFailed``."""

    def __init__(self, directory: Path, files: Files) -> None:
        self._directory = directory
        self._files = files
        self._paths: dict[int, Path] = {}

    def read_cached(self, locations: Sequence[Location]) -> list[bytes] | None:
        """The bodies, if they are little and in the page cache, else None; never waits for the disk."""
        # A list, not a generator: it is faster, and this is asked for every read.
        if sum([location.length for location in locations]) > INLINE_BYTES:
            return None
        bodies: list[bytes] = []
        with ExitStack() as opened:
            files: dict[int, ReadFile] = {}
            for at in locations:
                if at.segment not in files:
                    files[at.segment] = opened.enter_context(self._opened(at.segment))
                body = files[at.segment].read_cached(at.offset, at.length)
                if body is None:
                    return None
                bodies.append(body)
        return bodies

    def read(self, locations: Sequence[Location]) -> list[bytes]:
        """The bodies at ``locations``, in that order."""
        # Long ones are read alone, straight into the bytes that are returned.
        small = [location for location in locations if location.length <= SMALL_BYTES]
        unchanged = [Edited(location, location.length, location.length, b"") for location in small]
        cut = iter(_cut(self.gather(unchanged), small))
        bodies: list[bytes] = []
        for location in locations:
            if location.length <= SMALL_BYTES:
                bodies.append(next(cut))
                continue
            with self._opened(location.segment) as file:
                bodies.append(read_span(file, location))
        return bodies

    def gather_cached(self, pieces: Sequence[Piece]) -> bytes | bytearray | None:
        """As ``gather``, if it is little and in the page cache, else None; never waits for the disk."""
        return None if _num_read(pieces) > INLINE_BYTES else self._gather(pieces, may_wait=False)

    def gather(self, pieces: Sequence[Piece]) -> bytes | bytearray:
        """``pieces`` in one buffer, with a comma behind each."""
        made = self._gather(pieces, may_wait=True)
        assert made is not None, "whoever may wait gets it all"
        return made

    def _gather(self, pieces: Sequence[Piece], *, may_wait: bool) -> bytes | bytearray | None:
        if _num_read(pieces) <= SMALL_BYTES * len(pieces):
            # Short bodies are copied once more, which costs less than a place for each.
            parts = self.buffers(pieces, may_wait=may_wait)
            return None if parts is None else b"".join(parts)
        result, wanted = _lay_out(pieces)
        return result if self._fill(result, wanted, may_wait=may_wait) else None

    def buffers(self, pieces: Sequence[Piece], *, may_wait: bool) -> list[bytes | memoryview] | None:
        """Short ``pieces`` in memory, each ``Edited`` one with a comma behind it, read with their neighbours.

        None if the disk would have to be waited for, and must not be.
        """
        regions = self._regions(pieces, may_wait=may_wait)
        return None if regions is None else list(_parts(pieces, regions))

    def _regions(self, pieces: Sequence[Piece], *, may_wait: bool) -> "dict[int, _Regions] | None":
        """What ``pieces`` lie in, by segment."""
        regions: dict[int, _Regions] = {}
        for segment, bodies in groupby(sorted(_stored(pieces)), key=itemgetter(0)):
            starts, views = regions[segment] = _Regions([], [])
            with self._opened(segment) as file:
                for start, end in _runs(bodies):
                    view = memoryview(bytearray(end - start))
                    if not _fill_span(file, segment, _Span(start, end, [view]), may_wait=may_wait):
                        return None
                    starts.append(start)
                    views.append(view)
        return regions

    def _fill(self, result: bytearray, wanted: list[_Wanted], *, may_wait: bool) -> bool:
        """False if the disk would have to be waited for."""
        # In the order of the disk: neighbours are joined into one call.
        wanted.sort()
        for segment, members in groupby(wanted, key=itemgetter(0)):
            spans = _spans(list(members), memoryview(result))
            with self._opened(segment) as file:
                if not all(_fill_span(file, segment, span, may_wait=may_wait) for span in spans):
                    return False
        return True

    def open(self, segment: int) -> ReadFile:
        """The file of a segment, to be closed by the caller."""
        try:
            return self._files.open_read(self._path(segment))
        except OSError as error:
            raise unreadable(segment, error) from error

    @contextmanager
    def _opened(self, segment: int) -> Iterator[ReadFile]:
        file = self.open(segment)
        try:
            yield file
        except StorageFailed:  # an OSError as well, which has said already what is wrong
            raise
        except OSError as error:
            raise unreadable(segment, error) from error
        finally:
            file.close()

    def _path(self, segment: int) -> Path:
        """Kept, since making one costs as much as reading 100 KB."""
        path = self._paths.get(segment)
        if path is None:
            path = self._paths[segment] = segment_path(self._directory, segment)
        return path


def _num_read(pieces: Sequence[Piece]) -> int:
    return sum([piece.location.length for piece in pieces if isinstance(piece, Edited)])


def _stored(pieces: Sequence[Piece]) -> Iterator[tuple[int, int, int]]:
    """Segment, first byte and end of what is stored."""
    for piece in pieces:
        if isinstance(piece, Edited):
            segment, offset, length = piece.location.segment, piece.location.offset, piece.location.length
            yield segment, offset, offset + length


def _runs(bodies: Iterator[tuple[int, int, int]]) -> Iterator[tuple[int, int]]:
    """Sorted stretches of one segment, those joined between which there is no more than a gap."""
    _, start, end = next(bodies)
    for _, next_start, next_end in bodies:
        if next_start - end > GAP_BYTES:
            yield start, end
            start, end = next_start, next_end
        elif next_end > end:
            end = next_end
    yield start, end


def _parts(pieces: Sequence[Piece], regions: Mapping[int, _Regions]) -> Iterator[bytes | memoryview]:
    for piece in pieces:
        if isinstance(piece, Edited):
            starts, views = regions[piece.location.segment]
            offset = piece.location.offset
            place = bisect_right(starts, offset) - 1
            yield from edited_parts(piece, views[place], offset - starts[place])
        else:
            yield piece
            yield b","


def edited_parts(piece: Edited, view: memoryview, at: int) -> tuple[BytesLike, ...]:
    """The edited form of the body that begins at ``at`` in ``view``, and a comma."""
    return (
        view[at : at + piece.start],
        piece.text,
        view[at + piece.stop : at + piece.location.length],
        b",",
    )


def _lay_out(pieces: Sequence[Piece]) -> tuple[bytearray, list[_Wanted]]:
    """The result, with everything at its place but what is still to be read into it."""
    wanted: list[_Wanted] = []
    known: list[tuple[int, bytes | memoryview]] = []
    at = 0
    for piece in pieces:
        if isinstance(piece, Edited):
            body = piece.location
            wanted.append((body.segment, body.offset, at, piece))
            known.append((at + piece.start, piece.text))
        else:
            known.append((at, piece))
        at += len(piece) + 1
    # Commas everywhere: only those between the rows are left in the end.
    result = bytearray(b",") * at
    for place, data in known:
        result[place : place + len(data)] = data
    return result, wanted


def _spans(wanted: Sequence[_Wanted], result: memoryview) -> Iterator[_Span]:
    """``wanted``, sorted and of one segment, in runs of neighbours. What is not wanted in between is read as well."""
    longest_cut = max((piece.stop - piece.start for *_, piece in wanted), default=0)
    # One buffer for all that is read and thrown away, however often it is written over.
    unwanted = memoryview(bytearray(max(GAP_BYTES, longest_cut)))
    start = end = 0
    buffers: list[memoryview] = []
    for _, offset, at, piece in wanted:
        # Four buffers go with each body, and a call takes so many.
        if buffers and (not 0 <= offset - end <= GAP_BYTES or len(buffers) > MAX_BUFFERS - 4):
            yield _Span(start, end, buffers)
            buffers = []
        if not buffers:
            start = end = offset
        head, length, num_skipped = piece.start, piece.location.length, piece.stop - piece.start
        behind = at + head + len(piece.text)
        buffers += (
            unwanted[: offset - end],
            result[at : at + head],
            unwanted[:num_skipped],
            result[behind : behind + length - piece.stop],
        )
        end = offset + length
    if buffers:
        yield _Span(start, end, buffers)


def _fill_span(file: ReadFile, segment: int, span: _Span, *, may_wait: bool) -> bool:
    if file.fill(span.buffers, span.start, may_wait=may_wait):
        return True
    if may_wait:
        raise unreadable(segment, f"it ends before byte {span.end}")
    return False


def _cut(data: bytes | bytearray, locations: Sequence[Location]) -> list[bytes]:
    bodies, view, at = [], memoryview(data), 0
    for location in locations:
        bodies.append(bytes(view[at : at + location.length]))
        at += location.length + 1
    return bodies


def read_span(file: ReadFile, span: Location) -> bytes:
    """What lies there in the file of its segment. Raises ``StorageFailed``."""
    try:
        found = file.read(span.offset, span.length)
    except OSError as error:
        raise unreadable(span.segment, error) from error
    if len(found) < span.length:
        raise unreadable(span.segment, f"it ends before byte {span.offset + span.length}")
    return found


def unreadable(segment: int, reason: str | OSError) -> StorageFailed:
    """The error to raise for a segment of which something cannot be read.

    ``BodyUnreadable`` if it is gone or damaged; anything else, as too many open files, says nothing about the body.
    """
    message = f"segment {segment}: {reason}"
    if isinstance(reason, str) or reason.errno in DAMAGE:
        return BodyUnreadable(message)
    return StorageFailed(
        message, what="a stored body cannot be read now", hint="it is kept: read again once that is over"
    )
