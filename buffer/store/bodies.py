"""Reading bodies out of the segments: straight to where they are wanted, neighbours with one call."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from forebay.buffer.store.abc import Edited, Piece
from forebay.buffer.store.files import MAX_BUFFERS, Files, ReadFile
from forebay.buffer.store.rows import Location
from forebay.buffer.store.segments import segment_path
from forebay.core.errors import StorageFailed

INLINE_BYTES = 1 << 20
"""Up to so much is copied from the page cache where the caller stands; a thread would cost more."""
SMALL_BYTES = 16 << 10
"""Bodies up to this size are read with their neighbours and copied once more: that costs less than a call for each."""
GAP_BYTES = 4 << 10
"""Neighbours so near are read together: copying what lies between costs less than a system call."""

_Wanted = tuple[int, int, int, Edited]
"""Segment and offset of a body; where its edited form goes in the result, or which piece it is; the edit itself."""


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
        """The bodies, if they are few and in the page cache, else None; never waits for the disk."""
        data = self.gather_cached(_unchanged(locations))
        return None if data is None else _cut(data, locations)

    def read(self, locations: Sequence[Location]) -> list[bytes]:
        """The bodies at ``locations``, in that order."""
        small = [location for location in locations if location.length <= SMALL_BYTES]
        cut = iter(_cut(self.gather(_unchanged(small)), small))
        return [next(cut) if each.length <= SMALL_BYTES else self._read_alone(each) for each in locations]

    def _read_alone(self, location: Location) -> bytes:
        with self._opened(location.segment) as file:
            body = file.read(location.offset, location.length)
        if len(body) < location.length:
            raise _unreadable(location.segment, f"it ends before byte {location.offset + location.length}")
        return body

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
            return self._gather_small(pieces, may_wait=may_wait)
        result, wanted = _lay_out(pieces)
        return result if self._fill(result, wanted, may_wait=may_wait) else None

    def _gather_small(self, pieces: Sequence[Piece], *, may_wait: bool) -> bytes | None:
        """Short neighbours are read together and copied once more, which costs less than a place for each."""
        found: dict[int, tuple[memoryview, int]] = {}
        wanted = [(p.location.segment, p.location.offset, n, p) for n, p in enumerate(pieces) if isinstance(p, Edited)]
        for segment, members in groupby(sorted(wanted), key=itemgetter(0)):
            with self._opened(segment) as file:
                for run in _runs(list(members)):
                    start, end = run[0][1], run[-1][1] + run[-1][3].location.length
                    view = memoryview(bytearray(end - start))
                    if not _fill_span(file, segment, _Span(start, end, [view]), may_wait=may_wait):
                        return None
                    found.update((n, (view, offset - start)) for _, offset, n, _ in run)
        return b"".join(_parts(pieces, found))

    def _fill(self, result: bytearray, wanted: list[_Wanted], *, may_wait: bool) -> bool:
        """False if the disk would have to be waited for."""
        wanted.sort()
        return all(
            self._fill_from(segment, memoryview(result), list(members), may_wait=may_wait)
            for segment, members in groupby(wanted, key=itemgetter(0))
        )

    def _fill_from(self, segment: int, result: memoryview, wanted: Sequence[_Wanted], *, may_wait: bool) -> bool:
        with self._opened(segment) as file:
            return all(_fill_span(file, segment, span, may_wait=may_wait) for span in _spans(wanted, result))

    @contextmanager
    def _opened(self, segment: int) -> Iterator[ReadFile]:
        try:
            file = self._files.open_read(self._path(segment))
            try:
                yield file
            finally:
                file.close()
        except OSError as error:
            raise _unreadable(segment, str(error)) from error

    def _path(self, segment: int) -> Path:
        """Kept, since making one costs as much as reading 100 KB."""
        path = self._paths.get(segment)
        if path is None:
            path = self._paths[segment] = segment_path(self._directory, segment)
        return path


def _num_read(pieces: Sequence[Piece]) -> int:
    return sum([piece.location.length for piece in pieces if isinstance(piece, Edited)])


def _runs(wanted: Sequence[_Wanted]) -> Iterator[Sequence[_Wanted]]:
    """``wanted``, sorted and of one segment, cut where more than a gap lies between neighbours."""
    first = end = 0
    for place, (_, offset, _, piece) in enumerate(wanted):
        if place > first and not 0 <= offset - end <= GAP_BYTES:
            yield wanted[first:place]
            first = place
        end = offset + piece.location.length
    yield wanted[first:]


def _parts(pieces: Sequence[Piece], found: Mapping[int, tuple[memoryview, int]]) -> list[bytes | memoryview]:
    """What a reply is joined from; ``found`` tells by a piece's number what was read, and where in it the body is."""
    parts: list[bytes | memoryview] = []
    for number, piece in enumerate(pieces):
        if isinstance(piece, Edited):
            view, at = found[number]
            stop, end = at + piece.stop, at + piece.location.length
            parts += (view[at : at + piece.start], piece.text, view[stop:end], b",")
        else:
            parts += (piece, b",")
    return parts


def _lay_out(pieces: Sequence[Piece]) -> tuple[bytearray, list[_Wanted]]:
    """The result, with everything at its place but what is still to be read into it."""
    wanted: list[_Wanted] = []
    held: list[tuple[int, bytes | memoryview]] = []
    at = 0
    for piece in pieces:
        if isinstance(piece, Edited):
            body = piece.location
            wanted.append((body.segment, body.offset, at, piece))
            held.append((at + piece.start, piece.text))
            at += body.length + piece.start - piece.stop + len(piece.text) + 1
        else:
            held.append((at, piece))
            at += len(piece) + 1
    result = bytearray(b",") * at
    for place, data in held:
        result[place : place + len(data)] = data
    return result, wanted


def _spans(wanted: Sequence[_Wanted], result: memoryview) -> Iterator[_Span]:
    """``wanted``, sorted and of one segment, in runs of neighbours. What is not wanted in between is read as well."""
    longest_cut = max((piece.stop - piece.start for *_, piece in wanted), default=0)
    unwanted = memoryview(bytearray(max(GAP_BYTES, longest_cut)))
    start = end = 0
    buffers: list[memoryview] = []
    for _, offset, at, piece in wanted:
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
        raise _unreadable(segment, f"it ends before byte {span.end}")
    return False


def _unchanged(locations: Sequence[Location]) -> list[Edited]:
    return [Edited(location, location.length, location.length, b"") for location in locations]


def _cut(data: bytes | bytearray, locations: Sequence[Location]) -> list[bytes]:
    bodies, view, at = [], memoryview(data), 0
    for location in locations:
        bodies.append(bytes(view[at : at + location.length]))
        at += location.length + 1
    return bodies


def _unreadable(segment: int, reason: str) -> StorageFailed:
    return StorageFailed(
        f"segment {segment}: {reason}",
        what="a stored body cannot be read",
        hint="check the disk, or restore the data directory from a backup",
    )
