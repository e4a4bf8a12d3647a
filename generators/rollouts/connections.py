"""The connections of the ``openai`` clients, which go over ``httpx2``: one for each call under way."""

from collections.abc import Callable, Iterator

import httpx2

from forebay.engines.connections import AsyncBody, AsyncExchange, Transports, tls


class _Body(AsyncBody, httpx2.AsyncByteStream):
    pass


class RolloutConnections(AsyncExchange, httpx2.AsyncBaseTransport):
    """For an ``httpx2.AsyncClient``."""

    body_type = _Body

    def __init__(self) -> None:
        super().__init__(lambda: httpx2.AsyncHTTPTransport(verify=tls()))


class ThreadConnections(httpx2.BaseTransport):
    """For an ``httpx2.Client`` of many threads. Raises as ``RolloutConnections`` does."""

    def __init__(self) -> None:
        self._transports = Transports(lambda: httpx2.HTTPTransport(verify=tls()))

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """See ``httpx2``."""
        transport = self._transports.take(request)
        try:
            reply = transport.handle_request(request)
        except BaseException:  # whatever ended it, the transport can be used again
            self._give_back(request, transport)
            raise
        assert isinstance(reply.stream, httpx2.SyncByteStream)
        reply.stream = _ThreadBody(reply.stream, lambda: self._give_back(request, transport))
        reply.request = request
        return reply

    def close(self) -> None:
        """Close them all."""
        for transport in self._transports.take_all():
            transport.close()

    def _give_back(self, request: httpx2.Request, transport: httpx2.HTTPTransport) -> None:
        if not self._transports.give_back(request, transport):
            transport.close()


class _ThreadBody(httpx2.SyncByteStream):
    def __init__(self, inner: httpx2.SyncByteStream, give_back: Callable[[], None]) -> None:
        self._inner = inner
        self._give_back: Callable[[], None] | None = give_back

    def __iter__(self) -> Iterator[bytes]:
        yield from self._inner

    def close(self) -> None:
        # Once, as for `AsyncBody`.
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            try:
                self._inner.close()
            finally:
                give_back()
