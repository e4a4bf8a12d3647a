"""Connections to engines, each taken by one request at a time; as many as there are requests under way.

A pool of ``httpx`` or ``httpx2`` looks at all of its connections at the beginning and at the end of each request: with
hundreds of calls in flight that takes as long as everything else, and behind its limit calls wait unseen. Here a
request gets a whole transport for itself.
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
"""Idle connections to one server that are kept for later requests."""

T = TypeVar("T")


class Transports(Generic[T]):
    """Those of the requests under way, and those that wait for one. No lock: lists and sets are safe by themselves."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._idle: defaultdict[tuple[str, bytes], list[T]] = defaultdict(list)
        """By scheme and address of the server."""
        self._busy: set[T] = set()

    def take(self, request: Any) -> T:
        """One for ``request``: the one that was used last, whose connection is most likely still open."""
        idle = self._idle[request.url.scheme, request.url.netloc]
        # Not `if idle`: another thread may take the last one in between.
        try:
            transport = idle.pop()
        except IndexError:
            transport = self._make()
        self._busy.add(transport)
        return transport

    def give_back(self, request: Any, transport: T) -> bool:
        """Whether it is kept; otherwise it is to be closed."""
        # Gone already where `take_all` was faster: its request ends with an error.
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


class AsyncExchange:
    """What an asynchronous transport does, of ``httpx`` or of ``httpx2``: their interfaces are the same.

    Requests raise a ``TransportError``, also those under way when it is closed, and ``EngineError`` where a reply is
    larger than ``max_engine_reply_bytes``.
    """

    body_type: ClassVar[Callable[..., Any]]
    """An ``AsyncBody`` that is a stream of that package, which insists on its own."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._transports = Transports(make)
        self._max_bytes = limit_bytes()

    async def handle_async_request(self, request: Any) -> Any:
        """See ``httpx``."""
        transport = self._transports.take(request)
        offer_gzip(request)
        try:
            reply = await transport.handle_async_request(request)
        except BaseException:  # also a call that was cancelled
            await self._give_back(request, transport)
            raise
        parts = PlainParts(reply.headers, self._max_bytes)
        reply.stream = self.body_type(reply.stream, parts, lambda: self._give_back(request, transport))
        reply.request = request
        return reply

    async def aclose(self) -> None:
        """Close them all."""
        for transport in self._transports.take_all():
            await transport.aclose()

    async def _give_back(self, request: Any, transport: Any) -> None:
        if not self._transports.give_back(request, transport):
            await transport.aclose()


class AsyncBody:
    """The body of a reply, within its bounds; its connection is idle once it is closed."""

    def __init__(self, inner: Any, parts: PlainParts, give_back: Callable[[], Awaitable[None]]) -> None:
        self._inner = inner
        self._parts = parts
        self._give_back: Callable[[], Awaitable[None]] | None = give_back

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._parts.of_all(self._inner)

    async def aclose(self) -> None:
        # Once: a body may be closed again when its connection already carries another request.
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            try:
                await self._inner.aclose()
            finally:
                await give_back()


class _Body(AsyncBody, httpx.AsyncByteStream):
    pass


async def bound_body(reply: httpx.Response) -> None:
    """An event hook that bounds the replies of a client whose transports are the package's own."""
    assert isinstance(reply.stream, httpx.AsyncByteStream)
    reply.stream = _Body(reply.stream, PlainParts(reply.headers, limit_bytes()), _nothing)


async def _nothing() -> None:
    pass


class EngineConnections(AsyncExchange, httpx.AsyncBaseTransport):
    """For an ``httpx.AsyncClient``."""

    body_type = _Body

    def __init__(self) -> None:
        super().__init__(lambda: httpx.AsyncHTTPTransport(verify=tls()))


def names_proxies() -> bool:
    """Whether the environment names proxies. ``httpx`` asks them only for clients without a transport of their own."""
    return bool({"http", "https", "all"} & getproxies().keys())


@cache
def tls() -> ssl.SSLContext:
    """Shared: reading the certificates takes longer than the calls of most clients."""
    return httpx.create_ssl_context()
