"""The connections to the engines, and server-sent events as far as chat completions use them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Self

import httpx
import msgspec

from forebay.core.errors import EngineUnavailable
from forebay.engines.connections import EngineConnections
from forebay.engines.router_workers import auth_headers, unreachable

DONE_DATA = b"[DONE]"
DONE = b"data: %b\n\n" % DONE_DATA
EMPTY_LINES = (b"\n\n", b"\n\r\n")
STREAM_TYPE = b"text/event-stream"
TIMEOUT = {"connect": 10.0, "read": None, "write": None, "pool": None}
"""An answer may take as long as its call: the session ends it."""
ADMIN_TIMEOUT_S = 10.0
CONNECTION_HEADERS = frozenset(
    {
        *(b"connection", b"content-encoding", b"content-length", b"date", b"keep-alive", b"server"),
        *(b"transfer-encoding", b"upgrade"),
    }
)
"""Headers of an engine's reply that belong to its connection, and do not reach the agent."""

Headers = list[tuple[bytes, bytes]]

_encode = msgspec.json.Encoder().encode


class EngineBroken(EngineUnavailable):
    """The connection ended after the request was sent."""

    code = "engine_broken"


@dataclass(frozen=True, slots=True)
class EngineReply:
    """An engine's reply that came whole."""

    status: int
    headers: Headers
    content: bytes


class IncomingReply:
    """A reply that is coming: read it by its ``events``, or ``whole``."""

    def __init__(self, reply: httpx.Response) -> None:
        raw = [(name.lower(), value) for name, value in reply.headers.raw]
        self.status = reply.status_code
        self.headers = [(name, value) for name, value in raw if name not in CONNECTION_HEADERS]
        self._reply = reply

    async def events(self) -> AsyncIterator[bytes]:
        """The data of each event. Raises ``EngineBroken``."""
        reader = EventReader()
        try:
            async for received in self._reply.aiter_bytes():
                for data in reader.feed(received):
                    yield data
        except httpx.TransportError as error:
            raise _broken(self._reply.request.url, error) from error

    async def whole(self) -> EngineReply:
        """The rest as one reply. Raises ``EngineBroken``."""
        try:
            return EngineReply(self.status, self.headers, await self._reply.aread())
        except httpx.TransportError as error:
            raise _broken(self._reply.request.url, error) from error


class EngineHttp:
    """Sends requests to engines, as long as its context is entered. Time limits are the caller's."""

    def __init__(self, api_key: str | None) -> None:
        self._headers = {"content-type": "application/json", **auth_headers(api_key)}
        # A connection for each request under way: behind the limit of a pool calls would wait unseen.
        self._connections = EngineConnections()
        self.admin = httpx.AsyncClient(
            headers=auth_headers(api_key), timeout=ADMIN_TIMEOUT_S, transport=self._connections
        )
        """For administrative calls, over the same connections."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.admin.aclose()

    async def ask(self, method: str, url: str, content: bytes = b"", traceparent: str = "") -> EngineReply:
        """One request and its whole reply. Raises ``EngineUnavailable`` if nobody answers, ``EngineBroken``."""
        async with self.reply(method, url, content, traceparent) as reply:
            return await reply.whole()

    @asynccontextmanager
    async def reply(
        self, method: str, url: str, content: bytes = b"", traceparent: str = ""
    ) -> AsyncIterator[IncomingReply]:
        """One request, in the W3C trace context ``traceparent``, and its reply as it comes. Raises as ``ask`` does."""
        headers = {**self._headers, "traceparent": traceparent} if traceparent else self._headers
        # No client: it would keep the cookies of one agent's engine for the others, and follow redirects.
        request = httpx.Request(method, url, content=content, headers=headers, extensions={"timeout": dict(TIMEOUT)})
        try:
            reply = await self._connections.handle_async_request(request)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise unreachable(url, error) from error
        except httpx.TransportError as error:
            raise _broken(request.url, error) from error
        try:
            yield IncomingReply(reply)
        finally:
            await reply.aclose()


def _broken(url: httpx.URL, error: httpx.TransportError) -> EngineBroken:
    return EngineBroken(f"the connection to {url.host}:{url.port} ended: {error or type(error).__name__}")


class EventReader:
    """Cuts a stream of bytes into the data of its events. Comments, names and ids of events are left out."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, received: bytes) -> list[bytes]:
        """The data of the events that ``received`` completes."""
        # An event may come in pieces, cut anywhere: what follows the last empty line waits for more. Only around the
        # cut it is looked at again: an event may have as many pieces as it likes.
        cut = max(0, len(self._rest) - len(EMPTY_LINES[-1]))
        self._rest += received
        if all(self._rest.find(line, cut) < 0 for line in EMPTY_LINES):
            return []
        *whole, rest = bytes(self._rest).replace(b"\r\n", b"\n").split(b"\n\n")
        self._rest = bytearray(rest)
        return [data for block in whole if (data := _data_of(block))]


def _data_of(block: bytes) -> bytes:
    lines = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)


def event(data: object) -> bytes:
    """``data`` as one event."""
    return b"data: %b\n\n" % _encode(data)
