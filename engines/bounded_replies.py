"""How much an engine may answer: its bytes are counted as they arrive, and as they unfold.

Where the answer is compressed it is decompressed here, a step at a time, so that no few bytes become gigabytes first.
"""

import asyncio
import os
import zlib
from collections.abc import AsyncIterable, AsyncIterator, Iterator, MutableMapping
from typing import Any

from forebay.core.errors import EngineError

LIMIT_VARIABLE = "FOREBAY_MAX_ENGINE_REPLY_BYTES"
"""The setting ``max_engine_reply_bytes``, as processes that talk to engines are told it."""
DEFAULT_LIMIT_BYTES = 64 << 20
STEP_BYTES = 1 << 20
ACCEPTED = "gzip"
"""The one coding that engines are offered: others unfold in leaps that nothing bounds."""
OF_THE_CODING = ("content-encoding", "content-length")
"""Headers that no longer hold for what was decompressed."""


def limit_bytes() -> int:
    """Bytes of one engine's reply; the environment tells, for a process that was given none the default holds."""
    text = os.environ.get(LIMIT_VARIABLE, "")
    return int(text) if text.isdigit() else DEFAULT_LIMIT_BYTES


def offer_gzip(request: Any) -> None:
    """Let a request of ``httpx`` or ``httpx2`` ask for what ``PlainParts`` can read."""
    request.headers["accept-encoding"] = ACCEPTED


async def offer_gzip_async(request: Any) -> None:
    """``offer_gzip`` as an event hook of an asynchronous client."""
    offer_gzip(request)


class PlainParts:
    """The body of one reply, whose ``headers`` are changed to what comes out of it.

    Its methods raise ``EngineError`` for more than ``max_bytes``, and for what cannot be decompressed.
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
            headers.pop("content-encoding", None)  # httpx would decompress it, without a bound
            self._problem = f"the engine's reply is compressed by {coding!r:.40}, and only {ACCEPTED} was asked for"

    async def of_all(self, arriving: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
        """What the whole body stands for, as it arrives."""
        async for part in arriving:
            for num_steps, plain in enumerate(self.of(part)):
                if num_steps:  # a small part may unfold for long, and other calls go on meanwhile
                    await asyncio.sleep(0)
                yield plain
        for plain in self.end():
            yield plain

    def of(self, part: bytes) -> Iterator[bytes]:
        """What ``part``, the next that arrived, stands for."""
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
        """What is left when nothing more arrives."""
        if self._decoder is None or self._decoder.eof or self._left_arriving == self._max_bytes:
            return
        while plain := self._decompressed(b""):
            self._left = self._less(self._left, plain)
            yield plain
        if not self._decoder.eof:
            raise EngineError("the engine's reply cannot be decompressed: it ends too early")

    def _decompressed(self, part: bytes) -> bytes:
        try:
            plain: bytes = self._decoder.decompress(part, STEP_BYTES)
        except zlib.error as error:
            raise EngineError(f"the engine's reply cannot be decompressed: {error}") from error
        return plain

    def _less(self, left: int, part: bytes) -> int:
        if len(part) > left:
            hint = "raise max_engine_reply_bytes of the server, or ask for fewer tokens or choices at once"
            raise EngineError(f"the engine's reply is larger than {self._max_bytes} bytes", hint=hint)
        return left - len(part)
