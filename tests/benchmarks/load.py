"""A raw HTTP/1.1 client for benchmarks: it must cost less than what it measures."""

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Sent:
    """What a load took."""

    wall_s: float
    num_requests: int
    took_s: list[float]
    """How long each request took to the last byte of its reply, in the order of replies."""


class _Connection(asyncio.Protocol):
    """Sends the next request as soon as the reply to the last has come."""

    def __init__(self, requests: Iterator[bytes], done: "asyncio.Future[None]", took_s: list[float]) -> None:
        self._requests = requests
        self._done = done
        self._took_s = took_s
        self._began_s = 0.0
        self._head = b""
        self._left = -1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._next()

    def _next(self) -> None:
        request = next(self._requests, None)
        if request is None:
            self._transport.close()
            if not self._done.done():
                self._done.set_result(None)
            return
        self._began_s = time.perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        if self._left < 0:
            self._head += data
            head, found, body = self._head.partition(b"\r\n\r\n")
            if not found:
                return
            self._check(head, body)
            self._left = _content_length(head) - len(body)
            self._head = b""
        else:
            self._left -= len(data)
        if self._left == 0:
            self._left = -1
            self._took_s.append(time.perf_counter() - self._began_s)
            self._next()

    def _check(self, head: bytes, body: bytes) -> None:
        if b" 200 " not in head[:16] and not self._done.done():
            self._done.set_exception(AssertionError(f"{head!r} {body[:300]!r}"))

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(error or ConnectionError("the server closed the connection"))


def _content_length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line[15:])
    raise AssertionError(f"no content-length in {head!r}")


def post(path: str, body: bytes, kind: bytes = b"application/json") -> bytes:
    """An encoded POST request."""
    return b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n%s" % (
        path.encode(),
        kind,
        len(body),
        body,
    )


def send(url: str, make: Callable[[int], bytes], num_requests: int, concurrency: int) -> Sent:
    """Send ``num_requests`` requests ``make(i)`` over ``concurrency`` connections."""
    return asyncio.run(_send(url, make, num_requests, concurrency))


async def _send(url: str, make: Callable[[int], bytes], num_requests: int, concurrency: int) -> Sent:
    parts, loop = urlsplit(url), asyncio.get_running_loop()
    requests, took_s = (make(i) for i in range(num_requests)), list[float]()
    began_s = time.perf_counter()
    finished = [loop.create_future() for _ in range(concurrency)]
    for done in finished:
        await loop.create_connection(lambda done=done: _Connection(requests, done, took_s), parts.hostname, parts.port)
    await asyncio.gather(*finished)
    return Sent(time.perf_counter() - began_s, num_requests, took_s)
