"""Calls as the table ``calls`` has them: a row whose two frames bear out everything else in it.

``request`` holds the request's body. ``parts`` begins with a line of JSON (``PartsHead``), after which follow the bytes
of the reply. Both are zstandard frames with a checksum; what the columns of the row say stands in them as well, or
follows from them, so that nothing of a row changes unseen.
"""

from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Annotated, Any, NamedTuple, get_args

import msgspec

from forebay.core.errors import MissingExtra
from forebay.replay.engine.call_request import CallRequest
from forebay.replay.recording_reader import Frames

LEVEL = 3
MAX_REQUEST_BYTES = 64 << 20
"""Of a request's body, as the embedded engines take it."""
MAX_PARTS_BYTES = 512 << 20
"""Of a reply with its head; what is larger is not recorded."""
MAX_HEAD_BYTES = 16 << 20
"""Of the line before its bytes; as objects it takes up to thirty times as much."""
COLUMNS = "seq, lane, digest, nth, method, path, request, status, headers, parts, began_s"
Row = tuple[int, str, bytes, int, str, str, bytes, int, str, bytes, float]
Part = tuple[float, bytes]
"""Bytes of a reply, and when they came: seconds since the request."""


class CallReply(NamedTuple):
    """What an engine answered. It is not ``is_whole`` where the client left, or the engine died, before its end."""

    status: int
    content_type: str
    parts: Sequence[Part]
    is_whole: bool = True

    @property
    def body(self) -> bytes:
        """All parts of it."""
        return b"".join(content for _, content in self.parts)


class Place(NamedTuple):
    """Where a call stands: its number in the file, and how many equal ones of its lane came before."""

    seq: int
    nth: int
    began_s: float
    """Wall-clock seconds since the Unix epoch."""


class PartsHead(msgspec.Struct, frozen=True):
    """The first line of ``parts``. Each entry of its own ``parts`` is a number of bytes, and when they came."""

    seq: int
    nth: int
    began_s: float
    status: Annotated[int, msgspec.Meta(ge=200, le=599)]
    headers: dict[str, Annotated[str, msgspec.Meta(pattern=r"^[\t -~\u0080-\u00ff]*\Z")]]
    is_whole: bool
    parts: list[tuple[Annotated[int, msgspec.Meta(ge=0)], Annotated[float, msgspec.Meta(ge=0)]]]


class DamagedRow(Exception):
    """A row is not as it was written; the message says what does not fit."""


_head = msgspec.json.Decoder(PartsHead)
_encode = msgspec.json.Encoder().encode


def encode_call(place: Place, request: CallRequest, reply: CallReply, compress: Callable[[bytes], bytes]) -> Row:
    """The row of a call."""
    headers = {"content-type": reply.content_type} if reply.content_type else {}
    sizes = [(len(content), at_s) for at_s, content in reply.parts]
    head = PartsHead(place.seq, place.nth, place.began_s, reply.status, headers, reply.is_whole, sizes)
    parts = compress(b"".join((_encode(head), b"\n", reply.body)))
    names = request.lane, request.digest, place.nth, request.method, request.path
    return place.seq, *names, compress(request.body), reply.status, _encode(headers).decode(), parts, place.began_s


def typed_row(row: Any) -> Row:
    """The row, if its columns have the types that we write: SQLite keeps any. Raises ``DamagedRow``."""
    if tuple(map(type, row)) != get_args(Row):
        raise DamagedRow("its columns are not of their types")
    return row  # type: ignore[no-any-return]  # what was just looked at


def decode_call(row: Row, frames: Frames) -> tuple[CallRequest, CallReply]:
    """What a row holds. Raises ``DamagedRow`` for one in which anything has changed."""
    seq, lane, digest, nth, method, path, request_frame, status, headers, parts_frame, began_s = row
    body = _content(frames, request_frame, "request", MAX_REQUEST_BYTES)
    try:
        request = CallRequest.read(method, path, body)
    except UnicodeEncodeError:
        raise DamagedRow("its method or its path is no text") from None
    if (request.digest, request.lane) != (digest, lane):
        raise DamagedRow("its request is not that of its digest and lane")
    line, _, content = _content(frames, parts_frame, "parts", MAX_PARTS_BYTES).partition(b"\n")
    if len(line) > MAX_HEAD_BYTES:
        raise DamagedRow(f"its parts have a head of {len(line):,} bytes")
    try:
        head = _head.decode(line)
    except msgspec.MsgspecError as error:
        raise DamagedRow(f"its parts have no readable head: {error}") from None
    written = head.seq, head.nth, head.began_s, head.status, _encode(head.headers).decode()
    if written != (seq, nth, began_s, status, headers) or sum(size for size, _ in head.parts) != len(content):
        raise DamagedRow("its columns are not what its parts say")
    if content and head.status in (HTTPStatus.NO_CONTENT, HTTPStatus.RESET_CONTENT, HTTPStatus.NOT_MODIFIED):
        raise DamagedRow(f"its status, {head.status}, is of replies without a body")
    parts, start = [], 0
    for size, at_s in head.parts:
        parts.append((at_s, content[start : start + size]))
        start += size
    return request, CallReply(status, head.headers.get("content-type", ""), parts, head.is_whole)


def compressor() -> Callable[[bytes], bytes]:
    """Makes frames, in one thread at a time. Raises ``MissingExtra`` without zstandard."""
    try:
        import zstandard
    except ImportError:
        raise MissingExtra("zstandard", "zstd") from None
    return zstandard.ZstdCompressor(level=LEVEL, write_checksum=True).compress


def _content(frames: Frames, frame: object, what: str, most: int) -> bytes:
    try:
        return frames.content(frame, most=most)
    except ValueError as error:
        raise DamagedRow(f"its {what} cannot be read: {error}") from None
