"""Reads a file of records from an offset to its end, skipping damaged parts."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from forebay.core.records.disk_files import ReadFile
from forebay.core.records.log_records import HEADER_BYTES, MAGIC, Position, Record, decode_header, decode_payload

WINDOW_BYTES = 4 * 1024 * 1024


class LogDamage(NamedTuple):
    """Bytes from ``start`` to ``end`` of a segment that are not intact records."""

    start: int
    end: int
    records: Sequence[Record]
    """Records within them whose body alone is damaged."""


class SegmentScan:
    """The records in the first ``size`` bytes of one open segment."""

    def __init__(self, file: ReadFile, segment: int, size: int) -> None:
        self._file = file
        self._segment = segment
        self._size = size
        self._window = b""
        self._window_start = 0

    def parts(self, start: int) -> Iterator[Record | LogDamage]:
        """Yield everything from ``start``, in order and without gaps. Raises ``OSError`` and ``StorageFailed``."""
        while start < self._size:
            # A damaged record's length may be wrong, so the next record is searched byte by byte.
            record = self._record(start)
            if record is None or not record.is_whole:
                end = self._next_record(start + 1 if record is None else record.end.offset)
                yield LogDamage(start, end, self._rows_left(start, end))
                start = end
            else:
                yield record
                start = record.end.offset

    def _record(self, offset: int) -> Record | None:
        position = Position(self._segment, offset)
        data = self._bytes(offset, HEADER_BYTES)
        header = decode_header(data, position)
        if header is None:
            return None
        # The header has its own checksum, so this length can be trusted.
        length = header.before_body + header.body_length
        payload = self._bytes(offset + HEADER_BYTES, length)
        return decode_payload(header, data, payload, position) if len(payload) == length else None

    def _next_record(self, offset: int) -> int:
        """Where the next intact record begins, at or after ``offset``; the end of the segment if there is none."""
        while (offset := self._find_magic(offset)) < self._size:
            record = self._record(offset)
            if record is not None and record.is_whole:
                break
            # Lengths with a valid checksum are right, so a long body need not be searched.
            offset = offset + 1 if record is None else record.end.offset
        return offset

    def _rows_left(self, start: int, end: int) -> list[Record]:
        """The records from ``start`` to ``end`` whose body alone is damaged."""
        found: list[Record] = []
        while start < end:
            record = self._record(start)
            if record is not None:
                found.append(record)
            start = self._find_magic(start + 1) if record is None else record.end.offset
        return found

    def _find_magic(self, offset: int) -> int:
        while offset < self._size:
            self._load(offset, HEADER_BYTES)
            found = self._window.find(MAGIC, offset - self._window_start)
            if found >= 0:
                return self._window_start + found
            # A magic may begin in the last bytes of the window.
            offset = max(offset + 1, self._window_start + len(self._window) - len(MAGIC) + 1)
        return self._size

    def _bytes(self, offset: int, length: int) -> memoryview:
        """Return up to ``length`` bytes at ``offset``; fewer at the end of the segment."""
        self._load(offset, length)
        start = offset - self._window_start
        return memoryview(self._window)[start : start + length]

    def _load(self, offset: int, length: int) -> None:
        end = min(offset + length, self._size)
        if self._window_start <= offset and end <= self._window_start + len(self._window):
            return
        # Read in large windows, because a segment has tens of thousands of short records.
        wanted = min(max(length, WINDOW_BYTES), self._size - offset)
        self._window = self._file.read(offset, wanted)
        self._window_start = offset
