"""Replies without a framework: JSON at once, a large body in chunks, and the common error body."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.types import Receive, Send

from forebay.core.errors import ForebayError

Header = tuple[bytes, bytes]

JSON_HEADER: Header = (b"content-type", b"application/json")
CHUNK_BYTES = 128 << 10

encode = msgspec.json.Encoder().encode


class ClientGone(Exception):
    """The client disconnected before its body had arrived, or before its reply was sent."""


async def until_gone(receive: Receive) -> None:
    """Return when the client has disconnected. Its body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_json(send: Send, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    """Send a reply of encoded JSON."""
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": status, "headers": [JSON_HEADER, length, *headers]})
    await send({"type": "http.response.body", "body": body})


BodyPieces = AsyncIterator[Iterable[bytes | memoryview]]


@dataclass(frozen=True, slots=True)
class HttpReply:
    """A reply that is sent while it is built."""

    kind: Header
    """The content type."""
    num_bytes: int
    pieces: BodyPieces
    send_most: Callable[[], Awaitable[bytes | None]] | None = None
    """Sends all but the end of the body past the framework and returns the end; None if ``pieces`` must be sent."""


async def send_reply(
    send: Send, reply: HttpReply, is_gone: Callable[[], bool], before_last: Callable[[], Awaitable[bool]]
) -> bool:
    """Reply 200 in chunks; return whether the client stayed to the end.

    The last chunk is sent only if ``before_last`` returns true. Exceptions of ``pieces`` and ``before_last`` reach the
    caller. In both cases the reply has begun but cannot be finished, and the server closes the connection.
    """
    length = (b"content-length", b"%d" % reply.num_bytes)
    await send({"type": "http.response.start", "status": 200, "headers": [reply.kind, length]})
    # One chunk is always held back: the reply must not be complete before ``before_last`` agrees.
    last: bytes | memoryview | None = None if reply.send_most is None else await reply.send_most()
    if last is not None:
        return await _finish(send, last, is_gone, before_last)
    last, has_more = b"", False
    async for chunk in _chunks(reply.pieces):
        if is_gone():
            return False
        if last:
            await send({"type": "http.response.body", "body": last, "more_body": True})
            has_more = True
        last = chunk
    if has_more:  # the last chunk may wait for a slow client: `before_last` is called after that
        await send({"type": "http.response.body", "body": b"", "more_body": True})
    return await _finish(send, last, is_gone, before_last)


async def _finish(
    send: Send, last: bytes | memoryview, is_gone: Callable[[], bool], before_last: Callable[[], Awaitable[bool]]
) -> bool:
    if not await before_last():
        return False
    await send({"type": "http.response.body", "body": last})
    return not is_gone()


async def _chunks(pieces: AsyncIterator[Iterable[bytes | memoryview]]) -> AsyncIterator[bytes | memoryview]:
    """Join small pieces; pass large ones through."""
    gathered: list[bytes | memoryview] = []
    size = 0
    async for some in pieces:
        for piece in some:
            if len(piece) >= CHUNK_BYTES:  # joining would copy it
                yield b"".join(gathered)
                yield piece
                gathered, size = [], 0
                continue
            gathered.append(piece)
            size += len(piece)
            if size >= CHUNK_BYTES:
                yield b"".join(gathered)
                gathered, size = [], 0
    yield b"".join(gathered)


def error_body(error: ForebayError) -> dict[str, Any]:
    """The error body of every native route."""
    body = {"code": error.code, "message": error.message, "hint": error.hint}
    return {"error": body | ({"field": error.field} if error.field else {})}


def envelope(error: ForebayError) -> dict[str, Any]:
    """The error in slime's envelope, for slime's routes and for requests refused before routing."""
    return {"success": False, "message": error.message, "data": None, **error_body(error)}


def error_headers(error: ForebayError) -> list[tuple[bytes, bytes]]:
    """``Retry-After`` if the client should retry."""
    retry_after_s = getattr(error, "retry_after_s", None)
    return [] if retry_after_s is None else [(b"retry-after", b"%d" % retry_after_s)]
