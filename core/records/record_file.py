"""A file that is a log of its own, as a recording is: its rows are read at once, bodies when they are asked for.

Each record has one row. Its segment is 0, which no segment of a store has.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from forebay.core.records.disk_files import DiskReadFile
from forebay.core.records.log_records import (
    BODY_CHECKSUM_BYTES,
    HEADER_BYTES,
    JSON,
    MAGIC,
    Position,
    decode_header,
    encode_before,
    is_body,
    pack,
    packed_rows,
)
from forebay.core.records.recording_rows import FileRow
from forebay.core.records.rows import Location

SEGMENT = 0

_decode_msgpack = msgspec.msgpack.Decoder(tuple[FileRow]).decode
_decode_json = msgspec.json.Decoder(tuple[FileRow]).decode


class DamagedRecord(Exception):
    """The record at ``offset`` is not what was written; ``reason`` says what of it."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(offset, reason)
        self.offset, self.reason = offset, reason


class FileRecord(NamedTuple):
    """The record at ``offset``, and where its body lies."""

    row: FileRow
    offset: int
    body_offset: int
    body_length: int

    @property
    def end(self) -> int:
        """Where the next record begins."""
        return self.body_offset + self.body_length


def encode_record(row: FileRow, body: bytes, offset: int) -> bytes:
    """The record at ``offset`` of a file. Raises ``EntryTooLarge``."""
    packed, encoding = pack([row])
    return encode_before(packed, encoding, body, SEGMENT, offset) + body


class RecordFile:
    """The records of the file ``path``. Any thread may read it."""

    def __init__(self, path: Path) -> None:
        """Raises ``OSError``."""
        self._file = DiskReadFile(path)
        self.end = 0
        """Behind the last whole record, once ``records`` is at its end: a killed writer leaves an unfinished one."""

    def close(self) -> None:
        """Give the descriptor back."""
        self._file.close()

    def size(self) -> int:
        """The length of the file in bytes: it may grow. Raises ``OSError``."""
        return self._file.size()

    def starts_with(self, text: bytes) -> bool:
        """Whether these are the first bytes of the file. Raises ``OSError``."""
        return self._file.read(0, len(text)) == text

    def records(self) -> Iterator[FileRecord]:
        """Every record, up to one that the file does not hold to its end.

        Raises ``DamagedRecord``, ``OSError``, and ``StorageFailed`` for records of another version.
        """
        size = self.size()
        while (record := self._record(self.end, size)) is not None:
            self.end = record.end
            yield record

    def read(self, offset: int) -> FileRecord:
        """The record at ``offset``. Raises ``DamagedRecord``, ``OSError``."""
        record = self._record(offset, self.size())
        if record is None:
            raise DamagedRecord(offset, "it ends before its end")
        return record

    def body(self, record: FileRecord) -> bytes:
        """The body of a record. Raises ``DamagedRecord``, ``OSError``."""
        location = Location(SEGMENT, record.body_offset, record.body_length)
        data = self._file.read(location.offset - BODY_CHECKSUM_BYTES, BODY_CHECKSUM_BYTES + location.length)
        is_there = len(data) == BODY_CHECKSUM_BYTES + location.length
        if not is_there or not is_body(memoryview(data), BODY_CHECKSUM_BYTES, location):
            raise DamagedRecord(record.offset, "the body is not what was written")
        return data[BODY_CHECKSUM_BYTES:]

    def _record(self, offset: int, size: int) -> FileRecord | None:
        data = self._file.read(offset, HEADER_BYTES)
        header = decode_header(data, Position(SEGMENT, offset))
        if header is None:
            if len(data) < HEADER_BYTES and MAGIC.startswith(data[: len(MAGIC)]) and offset + len(data) == size:
                return None
            raise DamagedRecord(offset, "no record begins here")
        body_offset = offset + HEADER_BYTES + header.before_body
        if body_offset + header.body_length > size:
            return None
        packed = packed_rows(header, data, self._file.read(offset + HEADER_BYTES, header.before_body))
        if packed is None:
            raise DamagedRecord(offset, "the row of this record is not what was written")
        try:
            (row,) = _decode_json(packed) if header.encoding == JSON else _decode_msgpack(packed)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise DamagedRecord(offset, f"the row of this record is none of a recording: {error}") from None
        return FileRecord(row, offset, body_offset, header.body_length)
