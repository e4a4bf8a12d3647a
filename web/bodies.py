"""Request bodies: read within limits (a body that is too long is a 413), and decompressed."""

import asyncio
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from starlette.types import Receive, Scope

from forebay.core.errors import BodyTooLarge, InvalidInput
from forebay.web.body_room import BodyRoom, BodyShare
from forebay.web.connection_limits import RequestStalled
from forebay.web.http_protocol import connection_of
from forebay.web.replies import ClientGone

STEP_BYTES = 1 << 20
"""What one turn of decompression gives, more or less, before its size is looked at."""
GZIP_SLICE_BYTES = 64 << 10
ZSTD_SLICE_BYTES = 1 << 10
"""A few bytes of zstd can stand for 128 KiB, and its decoder knows no limit: small slices bound what comes of one."""
ZSTD_WINDOW_BYTES = 1 << 27


class BodyLimit(NamedTuple):
    """How long one body may be, and the setting that says so."""

    num_bytes: int
    setting: str


class BodyBudget:
    """Limits on request bodies: each for itself, and all that are in memory at once."""

    def __init__(self, max_body_bytes: int, max_bodies_bytes: int, body_room_wait_s: float = 60.0) -> None:
        self.max_body_bytes = max_body_bytes
        self.room = BodyRoom(max_bodies_bytes, body_room_wait_s)
        self._limit = min(BodyLimit(max_body_bytes, "max_body_bytes"), BodyLimit(max_bodies_bytes, "max_bodies_bytes"))

    async def read(self, scope: Scope, receive: Receive, narrower: BodyLimit | None = None) -> "RequestBody":
        """Read a body, which pays for its bytes as they arrive, and waits where there is no room for more.

        Raises ``BodyTooLarge`` without reading the rest, ``BufferFull``, ``RequestStalled``, ``ClientGone``.
        """
        limit, setting = self._limit if narrower is None else min(self._limit, narrower)
        announced = _content_length(scope)
        if announced > limit:  # before a byte is read: the client may not have begun to send
            raise BodyTooLarge(limit, setting)
        connection, room = connection_of(scope), self.room
        body = RequestBody(room)
        parts: list[bytes] = []
        size, has_more = 0, True
        try:
            while has_more:
                if connection is None:
                    message = await receive()
                else:
                    connection.is_awaited = connection.has_sent_body = True
                    message = await receive()
                    connection.is_awaited = False
                if message["type"] == "http.disconnect":
                    raise ClientGone
                part, has_more = message.get("body", b""), message.get("more_body", False)
                size += len(part)
                if size > limit:  # also of a body whose length was announced wrongly, or not at all
                    raise BodyTooLarge(limit, setting)
                if has_more:
                    room.begin(body)
                    if connection is not None and connection.is_late:
                        raise RequestStalled("the body stood still for too long", "body_timeout_s")
                if not room.take(body, len(part)):
                    if connection is not None:
                        connection.pause_reading()
                    await room.wait(body, len(part))
                parts.append(part)
        except BaseException:  # whatever ended the reading, the room must come back
            body.free()
            raise
        if len(parts) > 1:
            room.finish(body)
        body.data = parts[0] if len(parts) == 1 else b"".join(parts)
        return body


class RequestBody(BodyShare):
    """A body and the room that it takes; ``free`` it when it is done with."""

    __slots__ = ("_room", "data")

    def __init__(self, room: BodyRoom) -> None:
        super().__init__()
        self._room = room
        self.data = b""

    async def unfold(self, num_bytes: int) -> None:
        """Pay for ``num_bytes`` more that come of it. Raises ``BufferFull``, ``BodyTooLarge``."""
        self._room.begin(self)
        if not self._room.take(self, num_bytes):
            await self._room.wait(self, num_bytes)

    def finish(self) -> None:
        """Nothing more comes of it."""
        self._room.finish(self)

    def free(self) -> None:
        """Give the room back."""
        self._room.give_back(self)


def _content_length(scope: Scope) -> int:
    """What the client announced; 0 where it announced nothing, or nothing that is a number."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() else 0
    return 0


async def plain_body(coding: bytes, body: RequestBody, limit: int) -> bytes:
    """What ``body`` holds, decompressed as ``coding``, its Content-Encoding, says. ``limit`` holds for what comes out.

    Raises ``BodyTooLarge`` as soon as it is, ``InvalidInput`` for a broken stream or a coding that is not known.
    """
    coding = coding.strip().lower()
    if coding in (b"", b"identity"):
        return body.data
    decode = _DECODERS.get(coding)
    if decode is None:
        problem = f"Content-Encoding {coding.decode('latin-1')!r} is not understood"
        raise InvalidInput(problem, hint="send the body plain, or with gzip or zstd", field="Content-Encoding")
    # In threads, a step at a time: what a few bytes stand for is not known before, and other requests go on meanwhile.
    steps = _steps(decode(body.data))
    size, parts = 0, list[bytes]()
    while part := await asyncio.to_thread(next, steps, b""):
        size += len(part)
        if size > limit:
            raise BodyTooLarge(limit)
        await body.unfold(len(part))
        parts.append(part)
    body.finish()
    return b"".join(parts)


def _steps(parts: Iterator[bytes]) -> Iterator[bytes]:
    """Small parts joined to steps of some size. Raises ``InvalidInput`` for a broken stream."""
    gathered: list[bytes] = []
    size = 0
    try:
        for part in parts:
            gathered.append(part)
            size += len(part)
            if size >= STEP_BYTES:
                yield b"".join(gathered)
                gathered, size = [], 0
    except _BrokenStream as error:
        hint = "send the whole stream, compressed as Content-Encoding says"
        raise InvalidInput(f"the body cannot be decompressed: {error}", hint=hint, field="body") from None
    yield b"".join(gathered)


class _BrokenStream(Exception):
    """The compressed bytes are not what they should be."""


def _gunzip(body: bytes) -> Iterator[bytes]:
    return _inflated(body, GZIP_SLICE_BYTES, _GzipMember, zlib.error)


class _GzipMember:
    """zlib's decoder with a limit on what one call gives."""

    def __init__(self) -> None:
        self._decoder = zlib.decompressobj(wbits=31)

    def decompress(self, piece: bytes) -> bytes:
        return self._decoder.decompress(piece, STEP_BYTES)

    @property
    def eof(self) -> bool:
        return self._decoder.eof

    @property
    def rest(self) -> bytes:
        return self._decoder.unused_data if self._decoder.eof else self._decoder.unconsumed_tail


class _ZstdFrame:
    """zstandard's decoder."""

    def __init__(self) -> None:
        import zstandard

        self._decoder = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES).decompressobj()

    def decompress(self, piece: bytes) -> bytes:
        return self._decoder.decompress(piece)

    @property
    def eof(self) -> bool:
        return self._decoder.eof

    @property
    def rest(self) -> bytes:
        return self._decoder.unused_data


def _unzstd(body: bytes) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError:
        hint = "send gzip, or install zstandard at the server: pip install 'forebay[zstd]'"
        raise InvalidInput("this server cannot read zstd", hint=hint, field="Content-Encoding") from None
    return _inflated(body, ZSTD_SLICE_BYTES, _ZstdFrame, zstandard.ZstdError)


def _inflated(
    body: bytes, slice_bytes: int, new_decoder: Callable[[], Any], error_kind: type[Exception]
) -> Iterator[bytes]:
    """What a stream of one or more members, or frames, stands for, in parts."""
    decoder = new_decoder()
    try:
        for at in range(0, len(body), slice_bytes):
            left = body[at : at + slice_bytes]
            while left:
                if decoder.eof:  # gzip members and zstd frames may follow one another, as `cat a.gz b.gz` makes them
                    decoder = new_decoder()
                yield decoder.decompress(left)
                left = decoder.rest
        while not decoder.eof and (part := decoder.decompress(b"")):  # what a limit held back
            yield part
    except error_kind as error:
        raise _BrokenStream(error) from None
    if not decoder.eof:
        raise _BrokenStream("it ends too early")


_DECODERS = {b"gzip": _gunzip, b"x-gzip": _gunzip, b"zstd": _unzstd}
