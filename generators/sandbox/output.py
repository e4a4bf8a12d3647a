"""Input and output of a command. All output is read, and a limited part is kept."""

import asyncio
from contextlib import suppress

CHUNK_BYTES = 65_536


class Tail:
    """The end of a command's output, of both streams in the order of arrival."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._last = bytearray()

    def take(self, part: bytes) -> None:
        self._last += part
        del self._last[: -self._max_bytes]

    def text(self) -> str:
        return self._last.decode(errors="replace")


class Kept:
    """The beginning and the end of one output stream, ``max_bytes`` together."""

    def __init__(self, max_bytes: int, tail: Tail) -> None:
        self._tail = tail
        self._half = max(1, max_bytes // 2)
        self._first = bytearray()
        self._last = bytearray()
        self._num_cut = 0

    @property
    def is_cut(self) -> bool:
        return self._num_cut > 0

    async def read(self, stream: asyncio.StreamReader | None) -> None:
        """Read the stream to its end, because a command blocks while its pipe is full."""
        assert stream is not None
        while part := await stream.read(CHUNK_BYTES):
            self._take(part)
            self._tail.take(part)

    def _take(self, part: bytes) -> None:
        room = self._half - len(self._first)
        self._first += part[:room]
        self._last += part[room:]
        surplus = len(self._last) - self._half
        if surplus > 0:
            del self._last[:surplus]
            self._num_cut += surplus

    def text(self) -> str:
        """Return the kept output as text, with a line in place of what was cut out."""
        if not self.is_cut:
            return (self._first + self._last).decode(errors="replace")
        cut = f"\n[… {self._num_cut} bytes …]\n"
        return self._first.decode(errors="replace") + cut + self._last.decode(errors="replace")


async def feed(stream: asyncio.StreamWriter | None, data: bytes) -> None:
    """Write ``data`` and close the stream. The command need not read it."""
    assert stream is not None
    with suppress(BrokenPipeError, ConnectionResetError):
        stream.write(data)
        await stream.drain()
    # A command that ends without reading everything breaks the pipe, here or at the close.
    stream.close()
    with suppress(BrokenPipeError, ConnectionResetError):
        await stream.wait_closed()
