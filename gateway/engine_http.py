"""The connections to the engines.

Server-sent events, as far as chat completions use them.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import httpx
import msgspec

from forebay.core.errors import EngineUnavailable
from forebay.engines.admin import auth_headers, unreachable
from forebay.engines.connections import Connections

DONE_DATA = b"[DONE]"
DONE = b"data: %b\n\n" % DONE_DATA
STREAM_TYPE = b"text/event-stream"

_encode = msgspec.json.Encoder().encode


def event(data: object) -> bytes:
    """``data`` as one event."""
    return b"data: %b\n\n" % _encode(data)


class EventReader:
    """Cuts a stream of bytes into the data of its events. Comments, names and ids of events are left out."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, received: bytes) -> list[bytes]:
        """The data of the events that ``received`` completes."""
        *whole, self._rest = (self._rest + received).replace(b"\r\n", b"\n").split(b"\n\n")
        return [data for block in whole if (data := _data_of(block))]


def _data_of(block: bytes) -> bytes:
    lines = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)


TIMEOUT = {"connect": 10.0, "read": None, "write": None, "pool": None}
ADMIN_TIMEOUT_S = 10.0
OWN = frozenset(
    {
        *(b"connection", b"content-encoding", b"content-length", b"date", b"keep-alive", b"server"),
        *(b"transfer-encoding", b"upgrade"),
    }
)
"""Headers of an engine's reply that belong to its connection, and do not reach the agent."""

Headers = list[tuple[bytes, bytes]]


class Broken(EngineUnavailable):
    """The connection ended after the request was sent."""

    code = "engine_broken"


@dataclass(frozen=True, slots=True)
class Answer:
    """An engine's reply that came whole."""

    status: int
    headers: Headers
    content: bytes


class Events:
    """A reply that is still coming, event by event."""

    def __init__(self, reply: httpx.Response) -> None:
        self.status = reply.status_code
        self.headers = _passed_on(reply)
        self._reply = reply

    async def data(self) -> AsyncIterator[bytes]:
        """The data of each event. Raises ``Broken``."""
        reader = EventReader()
        try:
            async for received in self._reply.aiter_bytes():
                for data in reader.feed(received):
                    yield data
        except httpx.TransportError as error:
            raise _broken(self._reply.request.url, error) from error

    async def whole(self) -> Answer:
        """The rest as one reply. Raises ``Broken``."""
        try:
            return Answer(self.status, self.headers, await self._reply.aread())
        except httpx.TransportError as error:
            raise _broken(self._reply.request.url, error) from error


class Upstream:
    """Sends requests to engines, as long as its context is entered. Time limits are the caller's."""

    def __init__(self, api_key: str | None) -> None:
        self._headers = {"content-type": "application/json", **auth_headers(api_key)}
        self._connections = Connections()
        self.http = httpx.AsyncClient(
            headers=auth_headers(api_key), timeout=ADMIN_TIMEOUT_S, transport=self._connections
        )
        """For administrative calls, over the same connections."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.http.aclose()

    async def ask(self, method: str, url: str, content: bytes = b"") -> Answer:
        """One request and its whole reply. Raises ``EngineUnavailable`` if nobody answers, ``Broken``."""
        async with self.events(method, url, content) as reply:
            return await reply.whole()

    @asynccontextmanager
    async def events(self, method: str, url: str, content: bytes = b"") -> AsyncIterator[Events]:
        """One request and its reply as it comes. Raises as ``ask`` does."""
        # No client: it would keep the cookies of one agent's engine for the others, and follow redirects.
        request = httpx.Request(
            method, url, content=content, headers=self._headers, extensions={"timeout": dict(TIMEOUT)}
        )
        try:
            reply = await self._connections.handle_async_request(request)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise unreachable(url, error) from error
        except httpx.TransportError as error:
            raise _broken(request.url, error) from error
        try:
            yield Events(reply)
        finally:
            await reply.aclose()


def _broken(url: httpx.URL, error: httpx.TransportError) -> Broken:
    return Broken(f"the connection to {url.host}:{url.port} ended: {error or type(error).__name__}")


def _passed_on(reply: httpx.Response) -> Headers:
    raw = [(name.lower(), value) for name, value in reply.headers.raw]
    return [(name, value) for name, value in raw if name not in OWN]
