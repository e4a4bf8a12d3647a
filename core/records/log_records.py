"""One log entry as bytes: a header of fixed size, the rows, the checksum of the body, the body.

The header contains its own segment and offset, so that a copy of a record, for example inside a body, is
never mistaken for one. Its own checksum protects readers from a wrong length. The body's checksum is directly before
it, so a body can be verified without its record.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
from xxhash import xxh3_64, xxh3_64_intdigest

from forebay.core.errors import EntryTooLarge, InvalidInput, StorageFailed
from forebay.core.records.disk_files import BytesLike, ReadFile
from forebay.core.records.rows import GroupRow, Location, Row, SampleRow

MAGIC = b"\xf5FBR"
"""Begins with a byte that never occurs in UTF-8, and thus not in a JSON body."""
RECORD_VERSION = 3
MSGPACK = 0
JSON = 1
"""Used for rows with an integer beyond 64 bits, which MessagePack does not support."""
MAX_ROWS_BYTES = 128 << 20
"""Limit of one entry's rows. SQLite accepts texts of 10^9 bytes, and a byte may become six in JSON."""

_FIELDS = struct.Struct("<4sHHIQIQ")
_CHECKSUM = struct.Struct("<Q")
"""XXH3, 64 bits."""
HEADER_BYTES = _FIELDS.size + 2 * _CHECKSUM.size
BODY_CHECKSUM_BYTES = _CHECKSUM.size
OFFSET_BITS = 40
"""Bits for an offset within a segment, in the seed of a body's checksum."""
WINDOW_BYTES = 128 << 10
"""Bytes of a long body processed together: they fit a core's cache, which is five times faster."""

_LEAST, _MOST = -(2**63), 2**63 - 1
_WITH_EPOCH = (SampleRow, GroupRow)
_packer = msgspec.msgpack.Encoder()
_unpacker = msgspec.msgpack.Decoder(list[Row])
_json_encoder = msgspec.json.Encoder()
_json_decoder = msgspec.json.Decoder(list[Row])


class Position(NamedTuple):
    """A position in the log."""

    segment: int
    offset: int


class LogEntry(msgspec.Struct, frozen=True, gc=False):
    """The data of one ``append``. ``rows`` is a private copy, ``packed`` its encoding."""

    rows: Sequence[Row]
    packed: bytes
    encoding: int
    body: BytesLike | None
    body_length: int
    num_bytes: int
    """Length of its record."""


class Record(NamedTuple):
    """An entry found in the log; ``end`` is where the next one begins."""

    rows: list[Row]
    location: Location | None
    end: Position
    is_whole: bool = True
    """False if only its body is damaged."""


class Header(NamedTuple):
    """The decoded header of a record."""

    encoding: int
    packed_length: int
    body_length: int
    checksum: int

    @property
    def before_body(self) -> int:
        """Number of bytes between the header and the body."""
        return self.packed_length + BODY_CHECKSUM_BYTES


def make_entry(rows: Sequence[Row], body: BytesLike | None) -> LogEntry:
    """Encode ``rows``.

    Raises ``InvalidInput`` for an epoch or slot beyond 64 bits, ``EntryTooLarge``, and ``ValueError`` for a wrong call.
    """
    _check_rows(rows, body)
    packed, encoding = pack(rows)
    if len(rows) > 1 or body is None:
        # Decoding a copy protects the rows from later changes by the caller. A sample's row never changes.
        rows = decode_rows(packed, encoding)
    body_length = 0 if body is None else len(body)
    num_bytes = HEADER_BYTES + len(packed) + BODY_CHECKSUM_BYTES + body_length
    return LogEntry(rows, packed, encoding, body, body_length, num_bytes)


def check_fits(*rows: Row) -> None:
    """Raise ``EntryTooLarge`` if ``rows`` exceed the limit of one entry."""
    pack(rows)


def pack(rows: Sequence[msgspec.Struct]) -> tuple[bytes, int]:
    """Encode rows; returns the bytes and the encoding. Raises ``EntryTooLarge``."""
    try:
        packed, encoding = _packer.encode(rows), MSGPACK
    except OverflowError:
        packed, encoding = _json_encoder.encode(rows), JSON
    # The log would accept it but the index never could, which would block all writes and prevent a restart.
    if len(packed) > MAX_ROWS_BYTES:
        raise EntryTooLarge(f"it takes {len(packed)} bytes, but at most {MAX_ROWS_BYTES} can be indexed")
    return packed, encoding


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
        raise ValueError("an entry must have one sample row and its body, or neither")


def decode_rows(packed: BytesLike, encoding: int) -> list[Row]:
    """Decode the rows in ``packed``. Raises ``msgspec.MsgspecError``."""
    decoder = _json_decoder if encoding == JSON else _unpacker
    return decoder.decode(packed)


def _body_seed(segment: int, offset: int) -> int:
    """Seed of a body's checksum: the checksum of a body at another place does not match."""
    return (segment << OFFSET_BITS | offset) & 0xFFFF_FFFF_FFFF_FFFF


def _body_checksum(body: BytesLike, segment: int, offset: int) -> int:
    """XXH3 (64 bits) of a body and its location."""
    return xxh3_64_intdigest(body, _body_seed(segment, offset))


def _checksum_before(data: BytesLike, at: int) -> int:
    """Read the checksum before the body at ``at`` in ``data``."""
    found: int = _CHECKSUM.unpack_from(data, at - BODY_CHECKSUM_BYTES)[0]
    return found


def is_body(data: memoryview, at: int, location: Location) -> bool:
    """Whether ``data`` has at ``at``, after its checksum, the exact body of ``location``."""
    body = data[at : at + location.length]
    return _checksum_before(data, at) == _body_checksum(body, location.segment, location.offset)


def is_stored(file: ReadFile, location: Location) -> bool:
    """Whether the segment's file has this body, of any length, intact. Raises ``OSError``."""
    stored = file.read(location.offset - BODY_CHECKSUM_BYTES, BODY_CHECKSUM_BYTES)
    made = xxh3_64(seed=_body_seed(location.segment, location.offset))
    for window in _windows(file, location):
        made.update(window)
    return len(stored) == BODY_CHECKSUM_BYTES and _checksum_before(stored, BODY_CHECKSUM_BYTES) == made.intdigest()


def _windows(file: ReadFile, location: Location) -> Iterator[memoryview]:
    """Yield the body in windows, as much of it as exists."""
    buffer = memoryview(bytearray(min(WINDOW_BYTES, location.length)))
    for at in range(0, location.length, WINDOW_BYTES):
        window = buffer[: location.length - at]
        if not file.fill([window], location.offset + at, may_wait=True):
            return
        yield window


def encode_start(entry: LogEntry, segment: int, offset: int) -> bytes:
    """Encode everything before the body for a record of ``entry`` at this place."""
    return encode_before(entry.packed, entry.encoding, entry.body or b"", segment, offset)


def encode_before(packed: bytes, encoding: int, body: BytesLike, segment: int, offset: int) -> bytes:
    """Encode everything before ``body`` for a record of it and ``packed`` rows at this place."""
    fields = _FIELDS.pack(MAGIC, RECORD_VERSION, encoding, segment, offset, len(packed), len(body))
    body_offset = offset + HEADER_BYTES + len(packed) + BODY_CHECKSUM_BYTES
    of_body = _CHECKSUM.pack(_body_checksum(body, segment, body_offset))
    # Includes the place, so that a record copied elsewhere does not match. The body's checksum stands for the body.
    fields += _CHECKSUM.pack(_checksum(fields, packed, of_body))
    return b"".join((fields, _CHECKSUM.pack(_checksum(fields)), packed, of_body))


def _checksum(*parts: BytesLike) -> int:
    digest = xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.intdigest()


def decode_header(data: BytesLike, position: Position) -> Header | None:
    """Decode the header in ``data``; None if there is none, or it is damaged or belongs elsewhere.

    Raises ``StorageFailed`` for an intact header of another version.
    """
    if len(data) < HEADER_BYTES or data[:4] != MAGIC:
        return None
    end = HEADER_BYTES - _CHECKSUM.size
    if _checksum(data[:end]) != _CHECKSUM.unpack_from(data, end)[0]:
        return None
    _, version, encoding, segment, offset, packed_length, body_length = _FIELDS.unpack_from(data)
    if version != RECORD_VERSION:
        raise StorageFailed(
            f"segment {segment} has records of version {version}, but this Forebay reads version {RECORD_VERSION}",
            what="the log cannot be read",
            hint="use the version of Forebay that wrote them",
        )
    if (segment, offset) != position:
        return None
    return Header(encoding, packed_length, body_length, _CHECKSUM.unpack_from(data, _FIELDS.size)[0])


def decode_payload(header: Header, data: BytesLike, payload: BytesLike, position: Position) -> Record | None:
    """Decode the record after ``header`` (whose bytes are ``data``), or None if its rows are damaged."""
    packed = packed_rows(header, data, payload)
    if packed is None:
        return None
    try:
        rows = decode_rows(packed, header.encoding)
    except msgspec.MsgspecError:
        return None
    body_offset = position.offset + HEADER_BYTES + header.before_body
    body = Location(position.segment, body_offset, header.body_length)
    # Not by its length, because a body may be empty.
    has_body = any(isinstance(row, SampleRow) for row in rows)
    end = Position(position.segment, body_offset + header.body_length)
    return Record(rows, body if has_body else None, end, is_body(memoryview(payload), header.before_body, body))


def packed_rows(header: Header, data: BytesLike, payload: BytesLike) -> memoryview | None:
    """The rows at the start of ``payload``, or None if they or the checksum of the body are damaged."""
    before_body = memoryview(payload)[: header.before_body]
    if _checksum(data[: _FIELDS.size], before_body) != header.checksum:
        return None
    return before_body[: header.packed_length]
