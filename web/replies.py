"""Bodies and replies without a framework: the few lines of ASGI that the hot routes need."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any

import msgspec

from forebay.core.errors import BodyTooLarge, BufferFull, ForebayError
from forebay.core.waiting import Patience, Signal

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

Header = tuple[bytes, bytes]

JSON_HEADER: Header = (b"content-type", b"application/json")
CHUNK_BYTES = 128 << 10
BODY_WAIT_S = 60.0

encode = msgspec.json.Encoder().encode


class ClientGone(Exception):
    """The client went away before its body had come."""


class BodyBudget:
    """Limits on request bodies: each for itself, and all that are held at once."""

    def __init__(self, max_body_bytes: int, max_bodies_bytes: int) -> None:
        self.max_body_bytes = max_body_bytes
        self._free_bytes = max_bodies_bytes
        self._max_bytes = max_bodies_bytes
        self._freed = Signal()

    async def read(self, scope: Scope, receive: Receive) -> "HeldBody":
        """Read a body, waiting for room first. Raises ``BodyTooLarge`` without reading the rest, ``ClientGone``."""
        announced = _content_length(scope)
        limit = min(self.max_body_bytes, self._max_bytes)
        if announced is not None and announced > limit:
            raise BodyTooLarge(limit)
        held = HeldBody(self)
        try:
            if announced:
                await held.reserve(announced)
            held.data = await _receive_all(receive, held, limit)
        except BaseException:  # whatever ended the reading, the room must come back
            held.free()
            raise
        return held

    def try_take(self, num_bytes: int) -> bool:
        """Take room if it is there at once."""
        is_free = num_bytes <= self._free_bytes
        if is_free:
            self._free_bytes -= num_bytes
        return is_free

    async def take(self, num_bytes: int) -> None:
        """Wait for room. Raises ``BufferFull`` after a minute: bodies without a length may wait for each other."""
        patience = Patience(BODY_WAIT_S)
        while not self.try_take(num_bytes):
            if not await patience.wait(self._freed):
                raise BufferFull(f"request bodies already hold {self._max_bytes - self._free_bytes} bytes")

    def give(self, num_bytes: int) -> None:
        """Give room back."""
        self._free_bytes += num_bytes
        self._freed.notify()


class HeldBody:
    """A body and the room that it takes; ``free`` it when it is done with."""

    __slots__ = ("_budget", "_num_bytes", "data")

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._num_bytes = 0
        self.data = b""

    async def reserve(self, num_bytes: int) -> None:
        """See to it that room for ``num_bytes`` in all is held."""
        more = num_bytes - self._num_bytes
        if more > 0:
            if not self._budget.try_take(more):
                await self._budget.take(more)
            self._num_bytes += more

    def free(self) -> None:
        """Give the room back."""
        self._budget.give(self._num_bytes)
        self._num_bytes = 0


async def _receive_all(receive: Receive, held: HeldBody, limit: int) -> bytes:
    message = await receive()
    _check_there(message)
    body: bytes = message.get("body", b"")
    if not message.get("more_body"):
        _check_size(len(body), limit)
        return body
    parts, size = [body], len(body)
    while message.get("more_body"):
        _check_size(size, limit)
        await held.reserve(size)
        message = await receive()
        _check_there(message)
        parts.append(message.get("body", b""))
        size += len(parts[-1])
    _check_size(size, limit)
    return b"".join(parts)


def _check_there(message: Message) -> None:
    if message["type"] == "http.disconnect":
        raise ClientGone


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        raise BodyTooLarge(limit)


def _content_length(scope: Scope) -> int | None:
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() else None
    return None


async def send_json(send: Send, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    """Answer with encoded JSON."""
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": status, "headers": [JSON_HEADER, length, *headers]})
    await send({"type": "http.response.body", "body": body})


BodyPieces = AsyncIterator[Iterable[bytes | memoryview]]


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer that is sent while it is made."""

    kind: Header
    """The content type."""
    num_bytes: int
    pieces: BodyPieces
    send_most: Callable[[], Awaitable[bytes | None]] | None = None
    """Sends all but the end of the body past the framework and gives the end; None if ``pieces`` must be sent."""


async def send_reply(
    send: Send, reply: Reply, is_gone: Callable[[], bool], before_last: Callable[[], Awaitable[bool]]
) -> bool:
    """Answer 200 in chunks of some size; whether the client was there to the end.

    The last chunk goes once ``before_last`` is true, else never. What ``pieces`` or ``before_last`` raise goes to the
    caller. In both cases a reply that cannot be finished has begun, and the server closes the connection.
    """
    length = (b"content-length", b"%d" % reply.num_bytes)
    await send({"type": "http.response.start", "status": 200, "headers": [reply.kind, length]})
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
    if has_more:  # what was given to the server last may wait for a slow client: `before_last` is asked after that
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
    """Small pieces joined, large ones as they are."""
    gathered: list[bytes | memoryview] = []
    size = 0
    async for some in pieces:
        for piece in some:
            if len(piece) >= CHUNK_BYTES:
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
    """The one error body of every native route."""
    told = {"code": error.code, "message": error.message, "hint": error.hint}
    return {"error": told | ({"field": error.field} if error.field else {})}


def error_headers(error: ForebayError) -> list[tuple[bytes, bytes]]:
    """``Retry-After`` where the client is to try again."""
    retry_after_s = getattr(error, "retry_after_s", None)
    return [] if retry_after_s is None else [(b"retry-after", b"%d" % retry_after_s)]
