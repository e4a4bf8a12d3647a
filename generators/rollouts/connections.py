"""Connections of the ``openai`` clients over ``httpx2``: one per call in flight."""

from collections.abc import Callable, Iterator

import httpx2

from forebay.engines.bounded_replies import PlainParts, limit_bytes, offer_gzip
from forebay.engines.connections import KEPT_S, AsyncBody, AsyncExchange, Transports, tls

LIMITS = httpx2.Limits(keepalive_expiry=KEPT_S)


class _Body(AsyncBody, httpx2.AsyncByteStream):
    pass


class RolloutConnections(AsyncExchange, httpx2.AsyncBaseTransport):
    """Transport of an ``httpx2.AsyncClient``."""

    body_type = _Body

    def __init__(self) -> None:
        super().__init__(lambda: httpx2.AsyncHTTPTransport(verify=tls(), limits=LIMITS))


async def bound_body(reply: httpx2.Response) -> None:
    """Event hook that limits the size of replies for a client with the package's own transports."""
    assert isinstance(reply.stream, httpx2.AsyncByteStream)
    reply.stream = _Body(reply.stream, PlainParts(reply.headers, limit_bytes()), _nothing)


def bound_thread_body(reply: httpx2.Response) -> None:
    """Event hook that limits the size of replies for a synchronous client."""
    assert isinstance(reply.stream, httpx2.SyncByteStream)
    reply.stream = _ThreadBody(reply.stream, PlainParts(reply.headers, limit_bytes()), lambda: None)


async def _nothing() -> None:
    pass


class ThreadConnections(httpx2.BaseTransport):
    """Transport of an ``httpx2.Client`` used by many threads. Raises the same errors as ``RolloutConnections``."""

    def __init__(self) -> None:
        self._transports = Transports(lambda: httpx2.HTTPTransport(verify=tls(), limits=LIMITS))
        self._max_bytes = limit_bytes()

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request, as ``httpx2`` defines it."""
        transport = self._transports.take(request)
        offer_gzip(request)
        try:
            reply = transport.handle_request(request)
        except BaseException:  # the transport stays usable after any error
            self._give_back(request, transport)
            raise
        assert isinstance(reply.stream, httpx2.SyncByteStream)
        parts = PlainParts(reply.headers, self._max_bytes)
        reply.stream = _ThreadBody(reply.stream, parts, lambda: self._give_back(request, transport))
        reply.request = request
        return reply

    def close(self) -> None:
        """Close all connections."""
        for transport in self._transports.take_all():
            transport.close()

    def _give_back(self, request: httpx2.Request, transport: httpx2.HTTPTransport) -> None:
        if not self._transports.give_back(request, transport):
            transport.close()


class _ThreadBody(httpx2.SyncByteStream):
    def __init__(self, inner: httpx2.SyncByteStream, parts: PlainParts, give_back: Callable[[], None]) -> None:
        self._inner = inner
        self._parts = parts
        self._give_back: Callable[[], None] | None = give_back

    def __iter__(self) -> Iterator[bytes]:
        for part in self._inner:
            yield from self._parts.of(part)
        yield from self._parts.end()

    def close(self) -> None:
        # Only once, as in `AsyncBody`.
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            try:
                self._inner.close()
            finally:
                give_back()
