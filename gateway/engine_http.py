"""HTTP connections to the engines, and the subset of server-sent events that chat completions use."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import Self

import aiohttp
import msgspec

from forebay.core.addresses import without_login
from forebay.core.errors import EngineUnavailable
from forebay.engines.bounded_replies import ACCEPTED, PlainParts, limit_bytes
from forebay.engines.connections import KEPT_S, tls
from forebay.engines.router_workers import auth_headers, unreachable

DONE_DATA = b"[DONE]"
DONE = b"data: %b\n\n" % DONE_DATA
EMPTY_LINES = (b"\n\n", b"\n\r\n")
STREAM_TYPE = b"text/event-stream"
TIMEOUT = aiohttp.ClientTimeout(total=None, connect=10.0)
"""No total limit: the session ends an answer that takes too long."""
CONNECTION_HEADERS = frozenset(
    {
        *(b"connection", b"content-encoding", b"content-length", b"date", b"keep-alive", b"server"),
        *(b"transfer-encoding", b"upgrade"),
    }
)
"""Headers of an engine's reply that describe its connection and are not forwarded to the agent."""

Headers = list[tuple[bytes, bytes]]

_encode = msgspec.json.Encoder().encode


class EngineBroken(EngineUnavailable):
    """The connection ended after the request was sent."""

    code = "engine_broken"


@dataclass(frozen=True, slots=True)
class EngineReply:
    """A complete reply of an engine."""

    status: int
    headers: Headers
    content: bytes


class IncomingReply:
    """A reply being received: read its ``events``, or ``whole``, inside the context of ``EngineHttp.reply``."""

    def __init__(self, reply: aiohttp.ClientResponse) -> None:
        raw = [(name.lower(), value) for name, value in reply.raw_headers]
        self.status = reply.status
        self.headers = [(name, value) for name, value in raw if name not in CONNECTION_HEADERS]
        self._body = PlainParts(reply.headers.copy(), limit_bytes()).of_all(reply.content.iter_any())

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the data of each event."""
        reader = EventReader()
        async for received in self._body:
            for data in reader.feed(received):
                yield data

    async def whole(self) -> EngineReply:
        """Read the rest and return the complete reply."""
        return EngineReply(self.status, self.headers, b"".join([part async for part in self._body]))


class EngineHttp:
    """Sends requests to engines while its context is entered. The caller sets time limits."""

    def __init__(self, api_key: str | None) -> None:
        self._headers = {"content-type": "application/json", "accept-encoding": ACCEPTED, **auth_headers(api_key)}
        self._http: aiohttp.ClientSession
        self._bodies: dict[asyncio.Future[None], aiohttp.StreamReader] = {}
        """The body last read over each connection, keyed by the future that completes when the connection closes."""

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(
            # One connection per request: calls above the limit of a pool would wait unnoticed.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_S, ssl=tls()),
            cookie_jar=aiohttp.DummyCookieJar(),  # a jar would send one agent's cookies with other agents' calls
            timeout=TIMEOUT,
            auto_decompress=False,
            max_field_size=64 << 10,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def ask(self, method: str, url: str, content: bytes = b"", traceparent: str = "") -> EngineReply:
        """Send one request, return its whole reply. Raises ``EngineUnavailable`` if unreachable, ``EngineBroken``."""
        async with self.reply(method, url, content, traceparent) as reply:
            return await reply.whole()

    @asynccontextmanager
    async def reply(
        self, method: str, url: str, content: bytes = b"", traceparent: str = ""
    ) -> AsyncIterator[IncomingReply]:
        """Send one request in the W3C trace context ``traceparent``; yields its reply. Raises as ``ask`` does."""
        headers = {**self._headers, "traceparent": traceparent} if traceparent else self._headers
        url = without_login(url)
        data = BytesIO(content) if content else None  # sent in pieces: bytes would be written at once, however large
        try:
            reply = await self._http.request(method, url, data=data, headers=headers, allow_redirects=False)
            try:
                self._watch(reply)
                yield IncomingReply(reply)  # errors of reading it are raised here
            finally:
                reply.close()  # before the reply's end, this closes the connection, so that the engine stops
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise unreachable(url, error) from error
        except aiohttp.ClientError as error:
            raise EngineBroken(f"the connection to {url} ended: {str(error) or type(error).__name__}") from error

    def _watch(self, reply: aiohttp.ClientResponse) -> None:
        # When aiohttp itself closes a connection, for example for a malformed chunk, the reader of the body hangs.
        protocol = None if reply.connection is None else reply.connection.protocol
        ended = None if protocol is None else protocol.closed
        if ended is None:  # the body is complete
            return
        if ended not in self._bodies:
            ended.add_done_callback(self._end_body)
        self._bodies[ended] = reply.content

    def _end_body(self, ended: "asyncio.Future[None]") -> None:
        ended.exception()  # retrieved, because asyncio would log it
        body = self._bodies.pop(ended)
        if not body.is_eof() and body.exception() is None:
            body.set_exception(aiohttp.ClientPayloadError("the reply was malformed, or the gateway closed it"))


class EventReader:
    """Splits a stream of bytes into the data of its events. Ignores comments and the names and ids of events."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, received: bytes) -> list[bytes]:
        """Return the data of the events that ``received`` completes."""
        # An event may arrive in many pieces, so bytes after the last empty line wait for more. Only the bytes around
        # the seam are searched again, which keeps the cost linear.
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
    """Encode ``data`` as one event."""
    return b"data: %b\n\n" % _encode(data)
