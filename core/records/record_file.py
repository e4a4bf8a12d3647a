"""A file that is a log of its own, such as a recording: rows are read at once, bodies on request.

Each record has one row. Its segment is 0, which a store never uses.
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
    """The record at ``offset`` is damaged; ``reason`` says how."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(offset, reason)
        self.offset, self.reason = offset, reason


class FileRecord(NamedTuple):
    """The record at ``offset``, and the location of its body."""

    row: FileRow
    offset: int
    body_offset: int
    body_length: int

    @property
    def end(self) -> int:
        """Where the next record begins."""
        return self.body_offset + self.body_length


def encode_record(row: FileRow, body: bytes, offset: int) -> bytes:
    """Encode a record for ``offset`` of a file. Raises ``EntryTooLarge``."""
    packed, encoding = pack([row])
    return encode_before(packed, encoding, body, SEGMENT, offset) + body


class RecordFile:
    """The records of the file ``path``. Readable from any thread."""

    def __init__(self, path: Path) -> None:
        """Raises ``OSError``."""
        self._file = DiskReadFile(path)
        self.end = 0
        """End of the last complete record, after ``records`` is exhausted: a killed writer leaves an incomplete one."""

    def close(self) -> None:
        """Close the descriptor."""
        self._file.close()

    def size(self) -> int:
        """Current length of the file in bytes; it may grow. Raises ``OSError``."""
        return self._file.size()

    def starts_with(self, text: bytes) -> bool:
        """Whether the file starts with ``text``. Raises ``OSError``."""
        return self._file.read(0, len(text)) == text

    def records(self) -> Iterator[FileRecord]:
        """Yield every record, up to the first one that is incomplete.

        Raises ``DamagedRecord``, ``OSError``, and ``StorageFailed`` for records of another version.
        """
        size = self.size()
        while (record := self._record(self.end, size)) is not None:
            self.end = record.end
            yield record

    def read(self, offset: int) -> FileRecord:
        """Read the record at ``offset``. Raises ``DamagedRecord``, ``OSError``."""
        record = self._record(offset, self.size())
        if record is None:
            raise DamagedRecord(offset, "the file ends within this record")
        return record

    def body(self, record: FileRecord) -> bytes:
        """Read the body of a record. Raises ``DamagedRecord``, ``OSError``."""
        location = Location(SEGMENT, record.body_offset, record.body_length)
        data = self._file.read(location.offset - BODY_CHECKSUM_BYTES, BODY_CHECKSUM_BYTES + location.length)
        is_there = len(data) == BODY_CHECKSUM_BYTES + location.length
        if not is_there or not is_body(memoryview(data), BODY_CHECKSUM_BYTES, location):
            raise DamagedRecord(record.offset, "the body does not match its checksum")
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
            raise DamagedRecord(offset, "the row of this record does not match its checksum")
        try:
            (row,) = _decode_json(packed) if header.encoding == JSON else _decode_msgpack(packed)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise DamagedRecord(offset, f"the row of this record does not belong in a recording: {error}") from None
        return FileRecord(row, offset, body_offset, header.body_length)
