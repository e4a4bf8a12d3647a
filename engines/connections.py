"""Connections to engines, each used by one request at a time, one per request in flight.

A pool of ``httpx`` or ``httpx2`` scans all its connections at the start and end of each request. With hundreds of calls
in flight, this takes as long as everything else, and calls above the pool's limit wait unnoticed. Here each request
gets its own transport.
"""

import ssl
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import cache
from typing import Any, ClassVar, Generic, TypeVar
from urllib.request import getproxies

import httpx

from forebay.engines.bounded_replies import PlainParts, limit_bytes, offer_gzip

KEPT = 256
"""Maximum idle connections to one server kept for later requests."""
KEPT_S = 4.0
"""Seconds until an idle connection is closed. Engines close it later (uvicorn after 5 s), so no request is lost."""

T = TypeVar("T")


class Transports(Generic[T]):
    """Busy and idle transports. Needs no lock, because operations on lists and sets are atomic."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._idle: defaultdict[tuple[str, bytes], list[T]] = defaultdict(list)
        """By scheme and address of the server."""
        self._busy: set[T] = set()

    def take(self, request: Any) -> T:
        """Take a transport: the one used last, whose connection is most likely still open, or a new one."""
        idle = self._idle[request.url.scheme, request.url.netloc]
        # Not `if idle`: another thread may take the last transport in between.
        try:
            transport = idle.pop()
        except IndexError:
            transport = self._make()
        self._busy.add(transport)
        return transport

    def give_back(self, request: Any, transport: T) -> bool:
        """Return whether the transport is kept; otherwise the caller must close it."""
        # Already gone if `take_all` came first: its request ends with an error.
        self._busy.discard(transport)
        idle = self._idle[request.url.scheme, request.url.netloc]
        if len(idle) >= KEPT:
            return False
        idle.append(transport)
        return True

    def take_all(self) -> list[T]:
        """Remove and return every transport, to be closed."""
        taken = [*self._busy, *(transport for idle in self._idle.values() for transport in idle)]
        self._busy.clear()
        self._idle.clear()
        return taken


class AsyncExchange:
    """Base of asynchronous transports for ``httpx`` and ``httpx2``, whose interfaces are equal.

    Requests raise a ``TransportError``, also if the transport is closed while they are in flight, and ``EngineError``
    for a reply larger than ``max_engine_reply_bytes``.
    """

    body_type: ClassVar[Callable[..., Any]]
    """An ``AsyncBody`` that is also the package's own stream type, which the package requires."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._transports = Transports(make)
        self._max_bytes = limit_bytes()

    async def handle_async_request(self, request: Any) -> Any:
        """Send a request on its own transport; see ``httpx``."""
        transport = self._transports.take(request)
        offer_gzip(request)
        try:
            reply = await transport.handle_async_request(request)
        except BaseException:  # including cancellation
            await self._give_back(request, transport)
            raise
        parts = PlainParts(reply.headers, self._max_bytes)
        reply.stream = self.body_type(reply.stream, parts, lambda: self._give_back(request, transport))
        reply.request = request
        return reply

    async def aclose(self) -> None:
        """Close all transports."""
        for transport in self._transports.take_all():
            await transport.aclose()

    async def _give_back(self, request: Any, transport: Any) -> None:
        if not self._transports.give_back(request, transport):
            await transport.aclose()


class AsyncBody:
    """The size-limited body of a reply; closing it makes its connection idle."""

    def __init__(self, inner: Any, parts: PlainParts, give_back: Callable[[], Awaitable[None]]) -> None:
        self._inner = inner
        self._parts = parts
        self._give_back: Callable[[], Awaitable[None]] | None = give_back

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._parts.of_all(self._inner)

    async def aclose(self) -> None:
        # Only once: when a body is closed again, its connection may already carry another request.
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            try:
                await self._inner.aclose()
            finally:
                await give_back()


class _Body(AsyncBody, httpx.AsyncByteStream):
    pass


async def bound_body(reply: httpx.Response) -> None:
    """Event hook that limits the replies of a client that uses the package's own transports."""
    assert isinstance(reply.stream, httpx.AsyncByteStream)
    reply.stream = _Body(reply.stream, PlainParts(reply.headers, limit_bytes()), _nothing)


async def _nothing() -> None:
    pass


class EngineConnections(AsyncExchange, httpx.AsyncBaseTransport):
    """Transport for an ``httpx.AsyncClient``."""

    body_type = _Body

    def __init__(self) -> None:
        limits = httpx.Limits(keepalive_expiry=KEPT_S)
        super().__init__(lambda: httpx.AsyncHTTPTransport(verify=tls(), limits=limits))


def names_proxies() -> bool:
    """Whether the environment sets proxies. ``httpx`` uses them only for clients without a custom transport."""
    return bool({"http", "https", "all"} & getproxies().keys())


@cache
def tls() -> ssl.SSLContext:
    """Return a shared TLS context: loading the certificates takes longer than the calls of most clients."""
    return httpx.create_ssl_context()
