"""Whether what lies at the place of a stored body is that body, bit for bit.

Its checksum stands directly before it. Records of version 1 have none: there the record is looked for, whose checksum
covers the body as well.
"""

import zlib
from collections.abc import Iterator
from typing import NamedTuple

from xxhash import xxh3_64

from forebay.buffer.store.files import ReadFile
from forebay.buffer.store.log_records import (
    BODY_CHECKSUM_BYTES,
    HEADER_BYTES,
    MAGIC,
    Header,
    Position,
    begin_checksum,
    body_checksum,
    body_seed,
    checksum_before,
    decode_header,
)
from forebay.buffer.store.rows import Location

WINDOW_BYTES = 128 << 10
"""Of a long body that are looked at together: they stay within the cache of a core, which is five times faster."""
ROWS_BYTES = 4 << 10
MOST_ROWS_BYTES = 16 << 20
"""Within how many bytes before a body the header of its record is looked for: first, and at most."""


def is_marked_whole(region: memoryview, at: int, location: Location) -> bool:
    """Whether the body at ``at`` in ``region`` has the checksum that stands before it; never true for a damaged one."""
    body = region[at : at + location.length]
    return checksum_before(region, at) == body_checksum(body, location.segment, location.offset)


def is_whole(file: ReadFile, location: Location) -> bool:
    """The same of a body of any length, in the file of its segment, also of one of version 1. Raises ``OSError``."""
    stored = file.read(location.offset - BODY_CHECKSUM_BYTES, BODY_CHECKSUM_BYTES)
    made = xxh3_64(seed=body_seed(location.segment, location.offset))
    for window in _windows(file, location):
        made.update(window)
    if len(stored) == BODY_CHECKSUM_BYTES and checksum_before(stored, BODY_CHECKSUM_BYTES) == made.intdigest():
        return True
    old = _old_record(file, location)
    if old is None:
        return False
    checksum = old.checksum
    for window in _windows(file, location):
        checksum = zlib.crc32(window, checksum)
    return checksum == old.header.checksum


def _windows(file: ReadFile, location: Location) -> Iterator[memoryview]:
    """The body, some bytes at a time; as much of it as is there."""
    buffer = memoryview(bytearray(min(WINDOW_BYTES, location.length)))
    for at in range(0, location.length, WINDOW_BYTES):
        window = buffer[: location.length - at]
        if not file.fill([window], location.offset + at, may_wait=True):
            return
        yield window


class _OldRecord(NamedTuple):
    """The beginning of a record of version 1, and the checksum of all of it that lies before the body."""

    header: Header
    checksum: int


def _old_record(file: ReadFile, location: Location) -> _OldRecord | None:
    """The record whose body lies at ``location``; None if it is none of version 1."""
    length = HEADER_BYTES + ROWS_BYTES
    while length <= MOST_ROWS_BYTES:
        start = max(0, location.offset - length)
        data = file.read(start, location.offset - start)
        at = len(data)
        # Backwards: the nearest header is that of the record, for nothing but rows lies between the two.
        while (at := data.rfind(MAGIC, 0, at + len(MAGIC) - 1)) >= 0:
            first = data[at : at + HEADER_BYTES]
            header = decode_header(first, Position(location.segment, start + at))
            if header is not None:
                rows = data[at + HEADER_BYTES :]
                is_its = (header.version, len(rows), location.length) == (1, header.before_body, header.body_length)
                return _OldRecord(header, zlib.crc32(rows, begin_checksum(first))) if is_its else None
        if start == 0:
            return None
        length *= 16
    return None
