"""Records as version 1 wrote them: without a checksum of the body alone."""

import struct
import zlib

from forebay.buffer.store.log_records import MAGIC, LogEntry


def old_record(entry: LogEntry, segment: int, offset: int) -> bytes:
    """The record of version 1 at this place."""
    body = bytes(entry.body or b"")
    lengths = (len(entry.packed), len(body))
    fields = struct.pack("<4sHHIQIQ", MAGIC, 1, entry.encoding, segment, offset, *lengths)
    fields += struct.pack("<I", zlib.crc32(fields + entry.packed + body))
    return fields + struct.pack("<I", zlib.crc32(fields)) + entry.packed + body
