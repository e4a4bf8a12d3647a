"""Forwards requests to a real engine and its replies to the client, and keeps each part with its time."""

import asyncio
import time
from collections.abc import Callable
from http import HTTPStatus

import httpx
from starlette.types import Receive, Scope, Send

from forebay.core.errors import EngineError, InvalidInput
from forebay.engines.connections import EngineConnections
from forebay.engines.router_workers import root_url, unreachable
from forebay.replay.call_request import CallRequest
from forebay.replay.engine.served_engine import break_off, target_of
from forebay.replay.recorded_calls import CallReply, Part
from forebay.web.replies import until_gone

OF_THE_CONNECTION = frozenset(
    {
        *("accept-encoding", "connection", "content-encoding", "content-length", "date", "expect", "host"),
        *("keep-alive", "proxy-connection", "server", "te", "trailer", "transfer-encoding", "upgrade"),
    }
)
"""Headers that are not forwarded in either direction."""
OF_THE_REQUEST = OF_THE_CONNECTION - {"content-encoding"}
"""Request headers that are not forwarded. Bodies are forwarded unchanged, so their encoding is kept."""
TIMEOUT = {"connect": 10.0, "read": None, "write": None, "pool": None}
"""No read timeout: an answer may take as long as its client waits."""
FACT_TIMEOUT_S = 10.0
STREAM = "text/event-stream"

Headers = list[tuple[bytes, bytes]]


class Upstream:
    """The engine at ``url``. Raises ``InvalidInput`` unless ``url`` is an http(s) address."""

    def __init__(self, url: str) -> None:
        if not url:
            raise InvalidInput("the address of the engine is missing", field="upstream")
        self.url = root_url(url)
        self._connections = EngineConnections()

    async def close(self) -> None:
        """Close its connections."""
        await self._connections.aclose()

    async def get(self, path: str, headers: Headers) -> CallReply:
        """The engine's reply to ``GET path``. Raises ``EngineError``, ``TimeoutError``."""
        async with asyncio.timeout(FACT_TIMEOUT_S):
            reply = await self._sent("GET", path, b"", headers)
            try:
                content = await reply.aread()
            except httpx.TransportError as error:
                raise unreachable(self.url, error) from error
            finally:
                await reply.aclose()
        return CallReply(reply.status_code, reply.headers.get("content-type", ""), [(0.0, content)])

    async def relay(
        self, request: CallRequest, scope: Scope, receive: Receive, send: Send, keep: Callable[[CallReply], None]
    ) -> None:
        """Answer a request with the engine's reply. ``keep`` is called with what arrived of it.

        A whole reply is kept before the client has its end, so that the client's next call finds it.

        Raises ``EngineError`` if nothing arrived; nothing has been sent then, and nothing is kept.
        """
        relayed = _Relayed(scope, send, keep)
        relaying = asyncio.create_task(self._pass_on(request, scope, relayed))
        leaving = asyncio.create_task(until_gone(receive))
        try:
            await asyncio.wait({relaying, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            relaying.cancel()  # the engine sees that its client left
            await asyncio.gather(relaying, leaving, return_exceptions=True)
        if not relaying.cancelled():
            relaying.result()
        if not relayed.is_whole:
            keep(relayed.reply)

    async def _pass_on(self, request: CallRequest, scope: Scope, relayed: "_Relayed") -> None:
        reply = await self._sent(request.method, target_of(scope), request.body, scope["headers"])
        try:
            await relayed.begin(reply)
            assert isinstance(reply.stream, httpx.AsyncByteStream)
            async for content in reply.stream:  # already plain: httpx's decoder would only copy it
                await relayed.add(content)
            await relayed.end()
        except (httpx.TransportError, EngineError) as error:
            if not relayed.is_begun:
                raise error if isinstance(error, EngineError) else unreachable(self.url, error) from error
            relayed.break_off()
        finally:
            await reply.aclose()

    async def _sent(self, method: str, path: str, body: bytes, headers: Headers) -> httpx.Response:
        passed = [(name, value) for name, value in headers if name.decode("latin-1").lower() not in OF_THE_REQUEST]
        extensions = {"timeout": dict(TIMEOUT)}
        # No httpx client: it would share cookies between clients and follow redirects.
        request = httpx.Request(method, self.url + path, content=body, headers=passed, extensions=extensions)
        try:
            reply: httpx.Response = await self._connections.handle_async_request(request)
        except httpx.TransportError as error:
            raise unreachable(self.url, error) from error
        return reply


class _Relayed:
    """A reply on its way to a client. Unless it is a stream, it is sent and stored as one part."""

    def __init__(self, scope: Scope, send: Send, keep: Callable[[CallReply], None]) -> None:
        self.is_begun = False
        """Whether any part was sent."""
        self.is_whole = False
        self._scope = scope
        self._send = send
        self._keep = keep
        self._began_s = time.monotonic()
        self._status: int = HTTPStatus.OK
        self._kind = ""
        self._is_stream = False
        self._parts: list[Part] = []

    @property
    def reply(self) -> CallReply:
        """The reply as far as it has arrived."""
        return CallReply(self._status, self._kind, self._parts, self.is_whole)

    async def begin(self, reply: httpx.Response) -> None:
        """Take the status and headers."""
        self._status, self._kind = reply.status_code, reply.headers.get("content-type", "")
        self._is_stream = self._kind.startswith(STREAM)
        headers = [(name.lower(), value) for name, value in reply.headers.raw]
        self._headers = [(name, value) for name, value in headers if name.decode("latin-1") not in OF_THE_CONNECTION]
        if self._is_stream:
            await self._start(self._headers)

    async def add(self, content: bytes) -> None:
        """Take the next part of the body."""
        self._parts.append((round(time.monotonic() - self._began_s, 6), content))
        if self._is_stream:
            await self._send({"type": "http.response.body", "body": content, "more_body": True})

    async def end(self) -> None:
        """Complete the reply."""
        self.is_whole = True
        if self._is_stream:
            self._keep(self.reply)
            await self._send({"type": "http.response.body", "body": b""})
            return
        whole = self.reply.body
        self._parts = [(round(time.monotonic() - self._began_s, 6), whole)]
        self._keep(self.reply)
        await self._start([*self._headers, (b"content-length", b"%d" % len(whole))])
        await self._send({"type": "http.response.body", "body": whole})

    def break_off(self) -> None:
        """Cut the connection, so that the client sees that the reply is incomplete."""
        break_off(self._scope)

    async def _start(self, headers: Headers) -> None:
        self.is_begun = True
        await self._send({"type": "http.response.start", "status": self._status, "headers": headers})
