"""Limit the size of an engine's reply, counting both received and decompressed bytes.

Compressed replies are decompressed here, one step at a time, so that a few bytes never expand to gigabytes unchecked.
"""

import asyncio
import os
import zlib
from collections.abc import AsyncIterable, AsyncIterator, Iterator, MutableMapping
from typing import Any

from forebay.core.errors import EngineError

LIMIT_VARIABLE = "FOREBAY_MAX_ENGINE_REPLY_BYTES"
"""Environment variable that passes the setting ``max_engine_reply_bytes`` to processes that call engines."""
DEFAULT_LIMIT_BYTES = 64 << 20
STEP_BYTES = 1 << 20
ACCEPTED = "gzip"
"""The only content coding offered to engines: others decompress in steps of unbounded size."""
OF_THE_CODING = ("content-encoding", "content-length")
"""Headers that are wrong once the body is decompressed."""


def limit_bytes() -> int:
    """Maximum bytes of one engine reply: from the environment variable, otherwise the default."""
    text = os.environ.get(LIMIT_VARIABLE, "")
    return int(text) if text.isdigit() else DEFAULT_LIMIT_BYTES


def offer_gzip(request: Any) -> None:
    """Make a request of ``httpx`` or ``httpx2`` accept only the coding that ``PlainParts`` reads."""
    request.headers["accept-encoding"] = ACCEPTED


async def offer_gzip_async(request: Any) -> None:
    """``offer_gzip`` as an event hook of an asynchronous client."""
    offer_gzip(request)


class PlainParts:
    """Decompresses the body of one reply and removes the ``headers`` that described the compressed body.

    Methods raise ``EngineError`` for more than ``max_bytes`` bytes and for data that cannot be decompressed.
    """

    def __init__(self, headers: MutableMapping[str, str], max_bytes: int) -> None:
        self._left = self._left_arriving = self._max_bytes = max_bytes
        coding = headers.get("content-encoding", "").strip().lower()
        self._decoder: Any = None
        self._problem = ""
        if coding in ("gzip", "x-gzip"):
            self._decoder = zlib.decompressobj(wbits=31)
            for name in OF_THE_CODING:
                headers.pop(name, None)
        elif coding not in ("", "identity"):
            headers.pop("content-encoding", None)  # otherwise httpx would decompress it without a limit
            self._problem = f"the engine's reply is compressed with {coding!r:.40}, but only {ACCEPTED} was accepted"

    async def of_all(self, arriving: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
        """Yield the whole decompressed body as it arrives."""
        async for part in arriving:
            for num_steps, plain in enumerate(self.of(part)):
                if num_steps:  # a small part may take long to decompress, and other calls must run meanwhile
                    await asyncio.sleep(0)
                yield plain
        for plain in self.end():
            yield plain

    def of(self, part: bytes) -> Iterator[bytes]:
        """Yield the decompressed bytes of ``part``, the next part that arrived."""
        if self._problem:
            raise EngineError(self._problem)
        self._left_arriving = self._less(self._left_arriving, part)
        if self._decoder is None:
            yield part
            return
        while part and not self._decoder.eof:
            plain = self._decompressed(part)
            self._left = self._less(self._left, plain)
            yield plain
            part = self._decoder.unconsumed_tail

    def end(self) -> Iterator[bytes]:
        """Yield the remaining bytes after the last part."""
        if self._decoder is None or self._decoder.eof or self._left_arriving == self._max_bytes:
            return
        while plain := self._decompressed(b""):
            self._left = self._less(self._left, plain)
            yield plain
        if not self._decoder.eof:
            raise EngineError("the engine's reply cannot be decompressed: the compressed data is truncated")

    def _decompressed(self, part: bytes) -> bytes:
        try:
            plain: bytes = self._decoder.decompress(part, STEP_BYTES)
        except zlib.error as error:
            raise EngineError(f"the engine's reply cannot be decompressed: {error}") from error
        return plain

    def _less(self, left: int, part: bytes) -> int:
        if len(part) > left:
            hint = "raise the server's max_engine_reply_bytes, or request fewer tokens or choices per call"
            raise EngineError(f"the engine's reply is larger than {self._max_bytes} bytes", hint=hint)
        return left - len(part)
