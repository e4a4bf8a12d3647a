"""Reads bodies from the segments, neighbours together. Every returned body has been verified."""

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
"""Up to this size, bodies are copied from the page cache in the calling thread; another thread would cost more."""
STRETCH_BYTES = 256 << 10
"""Bytes read and verified together, so that they fit a core's cache. A longer body is read alone."""
KEPT_BYTES = 2 << 20
"""Bytes of read buffer that a thread keeps."""
GAP_BYTES = 4 << 10
"""Neighbours up to this far apart are read together: copying the gap costs less than a system call."""

DAMAGE = frozenset({errno.ENOENT, errno.EIO})
"""Error numbers of a read which mean that the file is missing or the disk has lost it."""

_num_bytes: "attrgetter[int]" = attrgetter("length")
_in_order: "attrgetter[tuple[int, int]]" = attrgetter("segment", "offset")


class _Region(NamedTuple):
    """Stretches of one segment in memory, sorted: their start offsets and their bytes."""

    starts: list[int]
    views: list[memoryview]

    def find(self, offset: int) -> tuple[memoryview, int]:
        """Return the stretch that contains ``offset``, and the position in it."""
        # Usually everything that is read together is one stretch.
        place = 0 if len(self.starts) == 1 else bisect_right(self.starts, offset) - 1
        return self.views[place], offset - self.starts[place]


Regions = Mapping[int, _Region]
"""Regions read, by segment."""


class Scratch:
    """A reusable read buffer: allocating memory costs the kernel more than reading into it."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def take(self, num_bytes: int) -> memoryview:
        """Return ``num_bytes`` of memory; invalidates what was taken before."""
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

    Raises ``StorageFailed``, and ``BodyUnreadable`` for a missing or damaged body.
    """

    def __init__(self, directory: Path, files: Files) -> None:
        self._directory = directory
        self._files = files
        self._paths: dict[int, Path] = {}
        self._of_thread = _OfThread()
        """The thread's read buffer; its contents are copied before the next read."""

    def read(self, locations: Sequence[Location]) -> list[bytes]:
        """Read the bodies at ``locations``, in order."""
        return self.read_slices([Slice(location, 0, location.length) for location in locations])

    def read_slices(self, slices: Sequence[Slice]) -> list[bytes]:
        """Read parts of bodies, in order."""
        found = self._read_slices(slices, may_wait=True)
        assert found is not None, "a read that may wait returns everything"
        return found

    def read_slices_cached(self, slices: Sequence[Slice]) -> list[bytes] | None:
        """Read small parts of bodies from the page cache; None if the disk would be needed."""
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
        """Join ``pieces`` in one buffer, with a comma after each."""
        made = self._gather(pieces, may_wait=True)
        assert made is not None, "a read that may wait returns everything"
        return made

    def gather_cached(self, pieces: Sequence[Piece]) -> bytes | None:
        """Join small ``pieces`` from the page cache; None if the disk would be needed."""
        read = [piece.location for piece in pieces if isinstance(piece, Edited)]
        return self._gather(pieces, may_wait=False) if _are_few(read) else None

    def _gather(self, pieces: Sequence[Piece], *, may_wait: bool) -> bytes | None:
        regions = self.load(pieces, self._of_thread.scratch, may_wait=may_wait)
        return None if regions is None else b"".join(_with_commas(pieces, regions))

    def prove(self, locations: Sequence[Location]) -> None:
        """Raise ``BodyUnreadable`` unless every body matches its checksum."""
        self._prove(locations, may_wait=True)

    def prove_cached(self, locations: Sequence[Location]) -> bool:
        """Whether the bodies are small, in the page cache, and match their checksums; never waits for the disk."""
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
        """Verify one long body, with only a part of it in memory at a time."""
        with self._opened(location.segment) as file:
            _check(file, location)

    def load(self, pieces: Sequence[Outbound], scratch: Scratch, *, may_wait: bool) -> Regions | None:
        """Load and verify what ``pieces`` need; valid until ``scratch`` is used again.

        Returns None if this would wait for the disk and ``may_wait`` is false.
        """
        stored = [piece for piece in pieces if isinstance(piece, Edited | Slice)]
        unproved = [each.location for each in stored if isinstance(each, Edited) or not each.is_proved]
        return self._load([read_for(each) for each in stored], unproved, scratch, may_wait=may_wait)

    def _load(
        self, spans: Sequence[Location], unproved: Sequence[Location], scratch: Scratch, *, may_wait: bool
    ) -> Regions | None:
        """Load ``spans``, which include all ``unproved`` bodies."""
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
        """Verify the bodies; False if that would need the disk and must not. Raises ``BodyUnreadable``."""
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
        """Open the file of a segment; the caller closes it."""
        try:
            return self._files.open_read(self._path(segment))
        except OSError as error:
            raise unreadable(segment, error) from error

    @contextmanager
    def _opened(self, segment: int) -> Iterator[ReadFile]:
        file = self.open(segment)
        try:
            yield file
        except StorageFailed:  # also an OSError, but it already has its message
            raise
        except OSError as error:
            raise unreadable(segment, error) from error
        finally:
            file.close()

    def _path(self, segment: int) -> Path:
        """Path of a segment; cached, because making it costs as much as reading 100 KB."""
        path = self._paths.get(segment)
        if path is None:
            path = self._paths[segment] = segment_path(self._directory, segment)
        return path


def _are_few(locations: Sequence[Location]) -> bool:
    # A list, not a generator: it is faster, and this runs for every read.
    return sum([location.length for location in locations]) <= INLINE_BYTES


def _segment(location: Location) -> int:
    return location.segment


def read_for(piece: Edited | Slice) -> Location:
    """The bytes to read for a piece: the whole body if it is not verified yet."""
    return piece.span if isinstance(piece, Slice) and piece.is_proved else piece.location


def _num_read(piece: Slice) -> int:
    return read_for(piece).length


def _runs(spans: Iterator[Location]) -> Iterator[tuple[int, int]]:
    """Join sorted spans of one segment across small gaps; yields start and end offsets."""
    start = end = -1
    for span in spans:
        # Includes the checksum, which precedes the body.
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
    """Yield the bytes of ``pieces``, with a comma after each ``Edited`` one."""
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
    """Raise ``BodyUnreadable`` unless the body matches its checksum."""
    if not is_stored(file, location):
        place = f"bytes {location.offset} to {location.offset + location.length}"
        raise unreadable(location.segment, f"{place} do not match their checksum")


def unreadable(segment: int, reason: str | OSError) -> StorageFailed:
    """Make the error for a segment that cannot be read.

    ``BodyUnreadable`` if it is missing or damaged; other errors, such as too many open files, concern no body.
    """
    message = f"segment {segment}: {reason}"
    if isinstance(reason, str) or reason.errno in DAMAGE:
        return BodyUnreadable(message)
    return StorageFailed(
        message, what="a stored body cannot be read now", hint="the body is kept: retry once the cause is gone"
    )
