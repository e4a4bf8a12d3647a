"""Calls of an engine as records: a ``CallRow``, and in its body what was asked and what was answered."""

from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import NamedTuple

from forebay.core.records.recording_rows import CallRow
from forebay.replay.call_request import CallRequest
from forebay.replay.frames import Frames

MAX_REQUEST_BYTES = 64 << 20
"""Of a request's body, as the embedded engines take it."""
MAX_REPLY_BYTES = 512 << 20
"""What is larger is not recorded."""
NO_BODY = (HTTPStatus.NO_CONTENT, HTTPStatus.RESET_CONTENT, HTTPStatus.NOT_MODIFIED)
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


class RecordedCall(NamedTuple):
    """What an engine was asked, and what it answered."""

    seq: int
    """Place in the order in which calls were asked."""
    began_s: float
    """When it was asked: seconds since the Unix epoch."""
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
    """The call of a row. Raises ``ValueError`` for what no recorder writes."""
    reply_bytes = sum(size for size, _ in row.parts)
    if row.request_bytes > MAX_REQUEST_BYTES:
        raise ValueError(f"its request has {row.request_bytes:,} bytes")
    if reply_bytes and row.status in NO_BODY:
        raise ValueError(f"its status, {row.status}, is of replies without a body")
    most = MAX_REQUEST_BYTES + MAX_REPLY_BYTES
    content = frames.content(body, row.request_bytes + reply_bytes, most=most)
    parts, start = list[Part](), row.request_bytes
    for size, at_s in row.parts:
        parts.append((at_s, content[start : start + size]))
        start += size
    request = CallRequest.read(row.method, row.path, content[: row.request_bytes])
    return RecordedCall(row.seq, row.began_s, request, CallReply(row.status, row.content_type, parts, row.is_whole))
