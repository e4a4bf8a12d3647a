"""Connections to engines, each taken by one request at a time; as many as there are requests under way.

A pool of ``httpcore`` looks at all of its connections at the beginning and at the end of each request: with hundreds of
calls in flight it takes longer than everything else, threads wait for each other there, and behind its limit calls wait
unseen. Here a request gets a whole transport of ``httpx`` for itself.
"""

import ssl
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import cache
from typing import Generic, TypeVar
from urllib.request import getproxies

import httpx

KEPT = 256
"""Idle connections to one server that are kept for later requests."""

T = TypeVar("T")


class _Transports(Generic[T]):
    """Those of the requests under way, and those that wait for one. No lock: lists and sets are safe by themselves."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._idle: defaultdict[tuple[str, bytes], list[T]] = defaultdict(list)
        """By scheme and address of the server."""
        self._busy: set[T] = set()

    def take(self, request: httpx.Request) -> T:
        """One for ``request``: the one that was used last, whose connection is most likely still open."""
        idle = self._idle[request.url.scheme, request.url.netloc]
        try:
            transport = idle.pop()
        except IndexError:
            transport = self._make()
        self._busy.add(transport)
        return transport

    def give_back(self, request: httpx.Request, transport: T) -> bool:
        """Whether it is kept; otherwise it is to be closed."""
        self._busy.discard(transport)
        idle = self._idle[request.url.scheme, request.url.netloc]
        if len(idle) >= KEPT:
            return False
        idle.append(transport)
        return True

    def take_all(self) -> list[T]:
        """Every one, to be closed."""
        taken = [*self._busy, *(transport for idle in self._idle.values() for transport in idle)]
        self._busy.clear()
        self._idle.clear()
        return taken


class Connections(httpx.AsyncBaseTransport):
    """For an ``httpx.AsyncClient``. Requests raise ``httpx.TransportError``, also those under way when it is closed."""

    def __init__(self) -> None:
        self._transports = _Transports(lambda: httpx.AsyncHTTPTransport(verify=tls()))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """See ``httpx``."""
        transport = self._transports.take(request)
        try:
            reply = await transport.handle_async_request(request)
        except BaseException:  # also a call that was cancelled
            await self._give_back(request, transport)
            raise
        assert isinstance(reply.stream, httpx.AsyncByteStream)
        reply.stream = _Stream(reply.stream, lambda: self._give_back(request, transport))
        reply.request = request
        return reply

    async def aclose(self) -> None:
        """Close them all."""
        for transport in self._transports.take_all():
            await transport.aclose()

    async def _give_back(self, request: httpx.Request, transport: httpx.AsyncHTTPTransport) -> None:
        if not self._transports.give_back(request, transport):
            await transport.aclose()


class _Stream(httpx.AsyncByteStream):
    """The body of a reply; its connection is idle once it is closed."""

    def __init__(self, inner: httpx.AsyncByteStream, give_back: Callable[[], Awaitable[None]]) -> None:
        self._inner = inner
        self._give_back: Callable[[], Awaitable[None]] | None = give_back

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._inner:
            yield part

    async def aclose(self) -> None:
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            try:
                await self._inner.aclose()
            finally:
                await give_back()


class ThreadConnections(httpx.BaseTransport):
    """``Connections`` for an ``httpx.Client`` of many threads."""

    def __init__(self) -> None:
        self._transports = _Transports(lambda: httpx.HTTPTransport(verify=tls()))

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """See ``httpx``."""
        transport = self._transports.take(request)
        try:
            reply = transport.handle_request(request)
        except BaseException:  # whatever ended it, the transport can be used again
            self._give_back(request, transport)
            raise
        assert isinstance(reply.stream, httpx.SyncByteStream)
        reply.stream = _ThreadStream(reply.stream, lambda: self._give_back(request, transport))
        reply.request = request
        return reply

    def close(self) -> None:
        """Close them all."""
        for transport in self._transports.take_all():
            transport.close()

    def _give_back(self, request: httpx.Request, transport: httpx.HTTPTransport) -> None:
        if not self._transports.give_back(request, transport):
            transport.close()


class _ThreadStream(httpx.SyncByteStream):
    """As ``_Stream``."""

    def __init__(self, inner: httpx.SyncByteStream, give_back: Callable[[], None]) -> None:
        self._inner = inner
        self._give_back: Callable[[], None] | None = give_back

    def __iter__(self) -> Iterator[bytes]:
        yield from self._inner

    def close(self) -> None:
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            try:
                self._inner.close()
            finally:
                give_back()


def names_proxies() -> bool:
    """Whether the environment names proxies. ``httpx`` asks them only for clients without a transport of their own."""
    return bool({"http", "https", "all"} & getproxies().keys())


@cache
def tls() -> ssl.SSLContext:
    """Shared: reading the certificates takes longer than the calls of most clients."""
    return httpx.create_ssl_context()
