"""Reading bodies out of the segments."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

from forebay.buffer.store.files import Files, ReadFile
from forebay.buffer.store.rows import Location
from forebay.buffer.store.segments import segment_path
from forebay.core.errors import StorageFailed

INLINE_BYTES = 64 * 1024
"""Up to so much is copied from the page cache where the caller stands; a thread would cost more."""
SMALL_BYTES = 16 * 1024
"""Bodies up to this size are read together with their neighbours: a copy costs less than a system call."""
GAP_BYTES = 4 * 1024
SPAN_BYTES = 1024 * 1024


class BodyReader:
    """Bodies in the segments of ``directory``. Any thread may call it. Raises ``StorageFailed``."""

    def __init__(self, directory: Path, files: Files) -> None:
        self._directory = directory
        self._files = files

    def read_cached(self, locations: Sequence[Location]) -> list[bytes] | None:
        """The bodies, if they are few and in the page cache, else None; never waits for the disk."""
        if sum(location.length for location in locations) > INLINE_BYTES:
            return None
        bodies = []
        for segment, members in groupby(locations, key=lambda location: location.segment):
            with self._opened(segment) as file:
                for location in members:
                    body = file.read_cached(location.offset, location.length)
                    if body is None:
                        return None
                    bodies.append(body)
        return bodies

    def read(self, locations: Sequence[Location]) -> list[bytes]:
        """The bodies at ``locations``, in that order."""
        places: dict[int, list[int]] = defaultdict(list)
        for place, location in enumerate(locations):
            places[location.segment].append(place)
        bodies = [b""] * len(locations)
        for segment, members in places.items():
            members.sort(key=lambda place: locations[place].offset)
            with self._opened(segment) as file:
                for span in spans(members, locations):
                    for place, body in _read_span(file, span, locations):
                        bodies[place] = body
        return bodies

    @contextmanager
    def _opened(self, segment: int) -> Iterator[ReadFile]:
        try:
            file = self._files.open_read(segment_path(self._directory, segment))
            try:
                yield file
            finally:
                file.close()
        except OSError as error:
            raise _unreadable(segment, str(error)) from error


def spans(places: Iterable[int], locations: Sequence[Location]) -> Iterator[list[int]]:
    """``places``, sorted by offset, in runs that are worth one read each."""
    span: list[int] = []
    for place in places:
        if span and not _belongs(locations[span[0]], locations[span[-1]], locations[place]):
            yield span
            span = []
        span.append(place)
    if span:
        yield span


def _belongs(first: Location, last: Location, location: Location) -> bool:
    return (
        max(last.length, location.length) <= SMALL_BYTES
        and location.offset - (last.offset + last.length) <= GAP_BYTES
        and location.offset + location.length - first.offset <= SPAN_BYTES
    )


def _read_span(file: ReadFile, span: list[int], locations: Sequence[Location]) -> Iterator[tuple[int, bytes]]:
    start = locations[span[0]].offset
    end = max(locations[place].offset + locations[place].length for place in span)
    data = file.read(start, end - start)
    if len(data) < end - start:
        raise _unreadable(locations[span[0]].segment, f"it ends before byte {end}")
    if len(span) == 1:
        yield span[0], data
        return
    for place in span:
        offset = locations[place].offset - start
        yield place, data[offset : offset + locations[place].length]


def _unreadable(segment: int, reason: str) -> StorageFailed:
    return StorageFailed(
        f"segment {segment}: {reason}",
        what="a stored body cannot be read",
        hint="check the disk, or restore the data directory from a backup",
    )
