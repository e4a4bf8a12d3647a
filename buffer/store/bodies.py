"""Reading bodies out of the segments, neighbours with one call. None leaves here before it is proved."""

import errno
import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from forebay.buffer.store.abc import Edited, Outbound, Piece, Slice, stretches
from forebay.buffer.store.log_segments import segment_path
from forebay.core.errors import BodyUnreadable, StorageFailed
from forebay.core.records.disk_files import BytesLike, Files, ReadFile
from forebay.core.records.log_records import BODY_CHECKSUM_BYTES, is_body, is_stored
from forebay.core.records.rows import Location

INLINE_BYTES = 1 << 20
"""Up to so much is copied from the page cache where the caller stands; a thread would cost more."""
STRETCH_BYTES = 256 << 10
"""What is read and proved together: it stays within the cache of a core. A longer body is alone."""
KEPT_BYTES = 2 << 20
"""Of the memory that is read into, what a thread keeps."""
GAP_BYTES = 4 << 10
"""Neighbours so near are read together: copying what lies between costs less than a system call."""

DAMAGE = frozenset({errno.ENOENT, errno.EIO})
"""What a read of a file says that is gone, or that the disk has lost."""

_num_bytes: "attrgetter[int]" = attrgetter("length")
_in_order: "attrgetter[tuple[int, int]]" = attrgetter("segment", "offset")


class _Region(NamedTuple):
    """Stretches of one segment in memory, sorted: where each begins, and its bytes."""

    starts: list[int]
    views: list[memoryview]

    def find(self, offset: int) -> tuple[memoryview, int]:
        """The stretch that has the byte at ``offset``, and where in it."""
        # Mostly all that is read together are neighbours.
        place = 0 if len(self.starts) == 1 else bisect_right(self.starts, offset) - 1
        return self.views[place], offset - self.starts[place]


Regions = Mapping[int, _Region]
"""What was read, by segment."""


class Scratch:
    """Memory to read into, used again and again: a new piece costs the kernel more than what is read into it."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def take(self, num_bytes: int) -> memoryview:
        """So many bytes; whatever was taken before must not be looked at any more."""
        if num_bytes > KEPT_BYTES:
            return memoryview(bytearray(num_bytes))
        if len(self._buffer) < num_bytes:
            self._buffer = bytearray(max(num_bytes, 2 * STRETCH_BYTES))
        return memoryview(self._buffer)[:num_bytes]


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.scratch = Scratch()


class BodyReader:
    """Bodies in the segments of ``directory``. Any thread may call it.

    Raises ``StorageFailed``, ``BodyUnreadable`` for a body that is gone or not what was written.
    """

    def __init__(self, directory: Path, files: Files) -> None:
        self._directory = directory
        self._files = files
        self._paths: dict[int, Path] = {}
        self._of_thread = _OfThread()
        """What is read there is copied before anything else is."""

    def read(self, locations: Sequence[Location]) -> list[bytes]:
        """The bodies at ``locations``, in that order."""
        return self.read_slices([Slice(location, 0, location.length) for location in locations])

    def read_slices(self, slices: Sequence[Slice]) -> list[bytes]:
        """Stretches of bodies, in that order."""
        found = self._read_slices(slices, may_wait=True)
        assert found is not None, "whoever may wait gets it all"
        return found

    def read_slices_cached(self, slices: Sequence[Slice]) -> list[bytes] | None:
        """The same if they are little and in the page cache, else None; never waits for the disk."""
        return self._read_slices(slices, may_wait=False) if _are_few([read_for(each) for each in slices]) else None

    def _read_slices(self, slices: Sequence[Slice], *, may_wait: bool) -> list[bytes] | None:
        made: list[bytes] = []
        scratch = self._of_thread.scratch
        for stretch, _ in stretches(slices, _num_read, STRETCH_BYTES):
            regions = self.load(stretch, scratch, may_wait=may_wait)
            if regions is None:
                return None
            made += [bytes(part) for part in parts(stretch, regions)]
        return made

    def gather(self, pieces: Sequence[Piece]) -> bytes:
        """``pieces`` in one buffer, with a comma behind each."""
        made = self._gather(pieces, may_wait=True)
        assert made is not None, "whoever may wait gets it all"
        return made

    def gather_cached(self, pieces: Sequence[Piece]) -> bytes | None:
        """The same if it is little and in the page cache, else None; never waits for the disk."""
        read = [piece.location for piece in pieces if isinstance(piece, Edited)]
        return self._gather(pieces, may_wait=False) if _are_few(read) else None

    def _gather(self, pieces: Sequence[Piece], *, may_wait: bool) -> bytes | None:
        regions = self.load(pieces, self._of_thread.scratch, may_wait=may_wait)
        return None if regions is None else b"".join(_with_commas(pieces, regions))

    def prove(self, locations: Sequence[Location]) -> None:
        """Raise ``BodyUnreadable`` unless every body is what was written."""
        self._prove(locations, may_wait=True)

    def prove_cached(self, locations: Sequence[Location]) -> bool:
        """Whether the bodies are little, in the page cache and what was written; never waits for the disk."""
        return _are_few(locations) and self._prove(locations, may_wait=False)

    def _prove(self, locations: Sequence[Location], *, may_wait: bool) -> bool:
        scratch = self._of_thread.scratch
        for stretch, num_bytes in stretches(locations, _num_bytes, STRETCH_BYTES):
            if may_wait and num_bytes > STRETCH_BYTES:
                self.prove_long(stretch[0])
            elif self._load(stretch, stretch, scratch, may_wait=may_wait) is None:
                return False
        return True

    def prove_long(self, location: Location) -> None:
        """The same of one body, of which no more than a part is in memory at a time."""
        with self._opened(location.segment) as file:
            _check(file, location)

    def load(self, pieces: Sequence[Outbound], scratch: Scratch, *, may_wait: bool) -> Regions | None:
        """What ``pieces`` lie in, proved and in memory, until ``scratch`` is used again.

        None if the disk would have to be waited for, and must not be.
        """
        stored = [piece for piece in pieces if isinstance(piece, Edited | Slice)]
        unproved = [each.location for each in stored if isinstance(each, Edited) or not each.is_proved]
        return self._load([read_for(each) for each in stored], unproved, scratch, may_wait=may_wait)

    def _load(
        self, spans: Sequence[Location], unproved: Sequence[Location], scratch: Scratch, *, may_wait: bool
    ) -> Regions | None:
        """``spans`` in memory, among them all bodies that are ``unproved``."""
        by_segment = [
            (segment, list(_runs(of_it))) for segment, of_it in groupby(sorted(spans, key=_in_order), _segment)
        ]
        left = scratch.take(sum(end - start for _, runs in by_segment for start, end in runs))
        regions: dict[int, _Region] = {}
        for segment, runs in by_segment:
            region = regions[segment] = _Region([], [])
            with self._opened(segment) as file:
                for start, end in runs:
                    view, left = left[: end - start], left[end - start :]
                    if not file.fill([view], start, may_wait=may_wait):
                        if may_wait:
                            raise unreadable(segment, f"it ends before byte {end}")
                        return None
                    region.starts.append(start)
                    region.views.append(view)
        return regions if self._are_whole(unproved, regions, may_wait=may_wait) else None

    def _are_whole(self, unproved: Sequence[Location], regions: Regions, *, may_wait: bool) -> bool:
        """False if only the disk can tell, and must not be asked. Raises ``BodyUnreadable``."""
        for location in unproved:
            region, at = regions[location.segment].find(location.offset)
            if is_body(region, at, location):
                continue
            if not may_wait:
                return False
            with self._opened(location.segment) as file:
                _check(file, location)
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


def _are_few(locations: Sequence[Location]) -> bool:
    # A list, not a generator: it is faster, and this is asked for every read.
    return sum([location.length for location in locations]) <= INLINE_BYTES


def _segment(location: Location) -> int:
    return location.segment


def read_for(piece: Edited | Slice) -> Location:
    """What must be read for a piece: all of a body that is still to be proved."""
    return piece.span if isinstance(piece, Slice) and piece.is_proved else piece.location


def _num_read(piece: Slice) -> int:
    return read_for(piece).length


def _runs(spans: Iterator[Location]) -> Iterator[tuple[int, int]]:
    """Where sorted spans of one segment begin and end, those joined between which there is no more than a gap."""
    start = end = -1
    for span in spans:
        # With the checksum, which stands before a body.
        first, last = span.offset - BODY_CHECKSUM_BYTES, span.offset + span.length
        if end >= 0 and first - end > GAP_BYTES:
            yield start, end
            end = -1
        if end < 0:
            start = first
        end = max(end, last)
    if end >= 0:
        yield start, end


def parts(pieces: Sequence[Outbound], regions: Regions) -> Iterator[BytesLike]:
    """The bytes of ``pieces``, with a comma behind each ``Edited`` one."""
    for piece in pieces:
        if isinstance(piece, Edited | Slice):
            location = piece.location
            if isinstance(piece, Slice):
                region, at = regions[location.segment].find(location.offset + piece.start)
                yield region[at : at + len(piece)]
            else:
                region, at = regions[location.segment].find(location.offset)
                yield region[at : at + piece.start]
                yield piece.text
                yield region[at + piece.stop : at + location.length]
                yield b","
        else:
            yield piece


def _with_commas(pieces: Sequence[Piece], regions: Regions) -> Iterator[BytesLike]:
    for piece in pieces:
        yield from parts((piece,), regions)
        if not isinstance(piece, Edited):
            yield b","


def _check(file: ReadFile, location: Location) -> None:
    """Raise ``BodyUnreadable`` unless the body is what was written."""
    if not is_stored(file, location):
        place = f"bytes {location.offset} to {location.offset + location.length}"
        raise unreadable(location.segment, f"{place} are not what was written")


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
