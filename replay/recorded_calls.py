"""Engine calls as records: a ``CallRow`` whose body has the request and the reply."""

from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import NamedTuple

from forebay.core.records.recording_rows import CallRow
from forebay.replay.call_request import CallRequest
from forebay.replay.frames import Frames

MAX_REQUEST_BYTES = 64 << 20
"""The largest request body, as in the embedded engines."""
MAX_REPLY_BYTES = 512 << 20
"""Larger replies are not recorded."""
NO_BODY = (HTTPStatus.NO_CONTENT, HTTPStatus.RESET_CONTENT, HTTPStatus.NOT_MODIFIED)
Part = tuple[float, bytes]
"""Bytes of a reply, and their arrival: seconds since the request."""


class CallReply(NamedTuple):
    """An engine's reply. ``is_whole`` is False if the client left or the engine died before its end."""

    status: int
    content_type: str
    parts: Sequence[Part]
    is_whole: bool = True

    @property
    def body(self) -> bytes:
        """All parts joined."""
        return b"".join(content for _, content in self.parts)


class RecordedCall(NamedTuple):
    """A request to an engine and its reply."""

    seq: int
    """The call's position in the order of requests."""
    began_s: float
    """When the request was sent: seconds since the Unix epoch."""
    request: CallRequest
    reply: CallReply


def encode_call(call: RecordedCall, compress: Callable[[bytes], bytes]) -> tuple[CallRow, bytes]:
    """The row of a call, and its body."""
    request, reply = call.request, call.reply
    row = CallRow(
        seq=call.seq,
        began_s=call.began_s,
        method=request.method,
        path=request.path,
        request_bytes=len(request.body),
        status=reply.status,
        content_type=reply.content_type,
        parts=[(len(content), at_s) for at_s, content in reply.parts],
        is_whole=reply.is_whole,
    )
    return row, compress(request.body + reply.body)


def decode_call(row: CallRow, body: bytes, frames: Frames) -> RecordedCall:
    """The call of a row. Raises ``ValueError`` for content that no recorder writes."""
    reply_bytes = sum(size for size, _ in row.parts)
    if row.request_bytes > MAX_REQUEST_BYTES:
        raise ValueError(f"its request has {row.request_bytes:,} bytes (at most {MAX_REQUEST_BYTES:,})")
    if reply_bytes and row.status in NO_BODY:
        raise ValueError(f"its status is {row.status}, which allows no body")
    most = MAX_REQUEST_BYTES + MAX_REPLY_BYTES
    content = frames.content(body, row.request_bytes + reply_bytes, most=most)
    parts, start = list[Part](), row.request_bytes
    for size, at_s in row.parts:
        parts.append((at_s, content[start : start + size]))
        start += size
    request = CallRequest.read(row.method, row.path, content[: row.request_bytes])
    return RecordedCall(row.seq, row.began_s, request, CallReply(row.status, row.content_type, parts, row.is_whole))
