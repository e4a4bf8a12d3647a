"""One entry of the log as bytes: a header of fixed size, the rows, the body.

The header names the segment and the offset at which it lies, so that a copy of a record, for example inside a body, is
never taken for one. It has a checksum of its own, because a wrong length must not lead the reader astray.
"""

import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from forebay.buffer.store.files import BytesLike
from forebay.buffer.store.rows import GroupRow, Location, Row, SampleRow
from forebay.core.errors import InvalidInput, StorageFailed

MAGIC = b"\xf5FBR"
"""Begins with a byte that never occurs in UTF-8, thus in no JSON body."""
RECORD_VERSION = 1
MSGPACK = 0
JSON = 1
"""Rows that hold an integer beyond 64 bits, which MessagePack cannot."""

_FIELDS = struct.Struct("<4sHHIQIQ")
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + 2 * _CHECKSUM.size

_LEAST, _MOST = -(2**63), 2**63 - 1
_WITH_EPOCH = (SampleRow, GroupRow)
_packer = msgspec.msgpack.Encoder()
_unpacker = msgspec.msgpack.Decoder(list[Row])
_json_encoder = msgspec.json.Encoder()
_json_decoder = msgspec.json.Decoder(list[Row])


class Position(NamedTuple):
    """A place in the log."""

    segment: int
    offset: int


class LogEntry(msgspec.Struct, frozen=True, gc=False):
    """What one ``append`` stores. ``rows`` are a copy that nobody else changes, ``packed`` the same as bytes."""

    rows: Sequence[Row]
    packed: bytes
    encoding: int
    body: BytesLike | None
    body_length: int
    num_bytes: int
    """The length of its record."""


class Record(NamedTuple):
    """An entry as it was found in the log; ``end`` is where the next one begins."""

    rows: list[Row]
    location: Location | None
    end: Position


class Header(NamedTuple):
    """The decoded beginning of a record."""

    encoding: int
    packed_length: int
    body_length: int
    checksum: int


def make_entry(rows: Sequence[Row], body: BytesLike | None) -> LogEntry:
    """Encode ``rows``. Raises ``InvalidInput`` for an epoch or slot beyond 64 bits, ``ValueError`` for a wrong call."""
    _check_rows(rows, body)
    try:
        packed, encoding = _packer.encode(rows), MSGPACK
    except OverflowError:
        packed, encoding = _json_encoder.encode(rows), JSON
    if len(rows) > 1 or body is None:
        # Reading the rows back frees them from later changes by the caller. A sample's row never changes.
        rows = decode_rows(packed, encoding)
    body_length = 0 if body is None else len(body)
    return LogEntry(rows, packed, encoding, body, body_length, HEADER_BYTES + len(packed) + body_length)


def _check_rows(rows: Sequence[Row], body: BytesLike | None) -> None:
    num_samples = 0
    for row in rows:
        if isinstance(row, SampleRow):
            num_samples += 1
            if not _LEAST <= row.slot <= _MOST:
                raise InvalidInput("slot does not fit into 64 bits", field="slot")
        if isinstance(row, _WITH_EPOCH) and not _LEAST <= row.epoch <= _MOST:
            raise InvalidInput("epoch does not fit into 64 bits", field="epoch")
    if num_samples != (body is not None):
        raise ValueError("an entry has one sample row and its body, or neither")


def decode_rows(packed: BytesLike, encoding: int) -> list[Row]:
    """The rows in ``packed``. Raises ``msgspec.MsgspecError``."""
    decoder = _json_decoder if encoding == JSON else _unpacker
    return decoder.decode(packed)


def encode_header(entry: LogEntry, position: tuple[int, int]) -> bytes:
    """The header that makes ``entry`` a record at ``position``."""
    packed, body = entry.packed, entry.body
    fields = _FIELDS.pack(MAGIC, RECORD_VERSION, entry.encoding, *position, len(packed), entry.body_length)
    # Over the place as well: a record copied elsewhere does not check.
    checksum = zlib.crc32(packed, zlib.crc32(fields))
    fields += _CHECKSUM.pack(checksum if body is None else zlib.crc32(body, checksum))
    return fields + _CHECKSUM.pack(zlib.crc32(fields))


def decode_header(data: BytesLike, position: Position) -> Header | None:
    """The header in ``data``, or None if it is none, damaged, or of another place.

    Raises ``StorageFailed`` for a header that is whole and of a newer version.
    """
    if len(data) < HEADER_BYTES or data[:4] != MAGIC:
        return None
    if zlib.crc32(data[: HEADER_BYTES - 4]) != _CHECKSUM.unpack_from(data, HEADER_BYTES - 4)[0]:
        return None
    _, version, encoding, segment, offset, packed_length, body_length = _FIELDS.unpack_from(data)
    if version > RECORD_VERSION:
        raise StorageFailed(
            f"segment {segment} holds records of version {version}, and this is version {RECORD_VERSION}",
            what="the journal cannot be read",
            hint="use the newer forebay that wrote them",
        )
    if (segment, offset) != position:
        return None
    return Header(encoding, packed_length, body_length, _CHECKSUM.unpack_from(data, _FIELDS.size)[0])


def decode_payload(header: Header, data: BytesLike, payload: BytesLike, position: Position) -> Record | None:
    """The record of ``header`` (whose bytes are ``data``) with what follows it, or None if that is damaged."""
    if zlib.crc32(payload, zlib.crc32(data[: _FIELDS.size])) != header.checksum:
        return None
    try:
        rows = decode_rows(memoryview(payload)[: header.packed_length], header.encoding)
    except msgspec.MsgspecError:
        return None
    body_offset = position.offset + HEADER_BYTES + header.packed_length
    # Not by its length: a body may be empty.
    has_body = any(isinstance(row, SampleRow) for row in rows)
    location = Location(position.segment, body_offset, header.body_length) if has_body else None
    return Record(rows, location, Position(position.segment, body_offset + header.body_length))
