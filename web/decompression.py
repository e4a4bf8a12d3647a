"""Decompresses bodies within a limit, and counts them against the budget as they grow."""

import asyncio
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from forebay.core.errors import BodyTooLarge, InvalidInput
from forebay.web.bodies import RequestBody

STEP_BYTES = 1 << 20
"""Approximate output of one step of decompression, after which the size is checked."""
GZIP_SLICE_BYTES = 64 << 10
ZSTD_SLICE_BYTES = 1 << 10
"""A few bytes of zstd can expand to 128 KiB, and its decoder has no limit: small slices bound the output."""
ZSTD_WINDOW_BYTES = 1 << 27


async def plain_body(coding: bytes, body: RequestBody, limit: int) -> bytes:
    """Decompress ``body`` as ``coding``, its Content-Encoding, says. ``limit`` applies to the output.

    Raises ``BodyTooLarge`` as soon as the output exceeds it, ``InvalidInput`` for a broken stream or an unknown coding.
    """
    coding = coding.strip().lower()
    if coding in (b"", b"identity"):
        return body.data
    decode = _DECODERS.get(coding)
    if decode is None:
        problem = f"Content-Encoding {coding.decode('latin-1')!r} is not supported"
        raise InvalidInput(problem, hint="send the body plain, or with gzip or zstd", field="Content-Encoding")
    # In threads, one step at a time: the output size is not known before, and other requests continue meanwhile.
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
    """Join small parts into larger steps. Raises ``InvalidInput`` for a broken stream."""
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
    """The compressed bytes are invalid."""


def _gunzip(body: bytes) -> Iterator[bytes]:
    return _inflated(body, GZIP_SLICE_BYTES, _GzipMember, zlib.error)


class _GzipMember:
    """zlib's decoder with a limit on the output of one call."""

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
    """Decompress a stream of one or more members or frames, in parts."""
    decoder = new_decoder()
    try:
        for at in range(0, len(body), slice_bytes):
            left = body[at : at + slice_bytes]
            while left:
                if decoder.eof:  # gzip members and zstd frames may follow one another, as `cat a.gz b.gz` makes them
                    decoder = new_decoder()
                yield decoder.decompress(left)
                left = decoder.rest
        while not decoder.eof and (part := decoder.decompress(b"")):  # output that a limit held back
            yield part
    except error_kind as error:
        raise _BrokenStream(error) from None
    if not decoder.eof:
        raise _BrokenStream("it ends too early")


_DECODERS = {b"gzip": _gunzip, b"x-gzip": _gunzip, b"zstd": _unzstd}
