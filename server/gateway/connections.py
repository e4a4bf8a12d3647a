"""Connections to engines, each taken by one request at a time."""

import ssl
from collections.abc import AsyncIterator
from functools import cache

import httpx

KEPT = 256
"""Idle connections that are kept for later requests."""


class Connections(httpx.AsyncBaseTransport):
    """A transport of many transports with one connection each (to every host that was asked).

    A pool of ``httpcore`` looks at all of its connections at the beginning and at the end of each request: with
    hundreds of calls in flight it takes longer than everything else.
    """

    def __init__(self) -> None:
        self._idle: list[httpx.AsyncHTTPTransport] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Raises ``httpx.TransportError``."""
        transport = self._idle.pop() if self._idle else httpx.AsyncHTTPTransport(verify=_tls())
        try:
            reply = await transport.handle_async_request(request)
        except BaseException:  # also a call that was cancelled
            await self._give_back(transport)
            raise
        assert isinstance(reply.stream, httpx.AsyncByteStream)
        reply.stream = _Stream(reply.stream, self, transport)
        reply.request = request
        return reply

    async def aclose(self) -> None:
        """Close the idle ones. Requests must have ended."""
        while self._idle:
            await self._idle.pop().aclose()

    async def _give_back(self, transport: httpx.AsyncHTTPTransport) -> None:
        if len(self._idle) < KEPT:
            self._idle.append(transport)
        else:
            await transport.aclose()


class _Stream(httpx.AsyncByteStream):
    """The body of a reply; its connection is free once it is closed."""

    def __init__(
        self, inner: httpx.AsyncByteStream, connections: Connections, transport: httpx.AsyncHTTPTransport
    ) -> None:
        self._inner = inner
        self._connections = connections
        self._transport: httpx.AsyncHTTPTransport | None = transport

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._inner:
            yield part

    async def aclose(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            try:
                await self._inner.aclose()
            finally:
                await self._connections._give_back(transport)


@cache
def _tls() -> ssl.SSLContext:
    """Shared: reading the certificates takes long."""
    return httpx.create_ssl_context()
