"""One request of an agent and its reply, in any protocol.

``Exchange`` makes a chat, ``PassedOn`` any other request to the engine. Both are ASGI applications that a route
returns, and that end the engine's work when the agent disconnects.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from http import HTTPStatus

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from forebay.core.waiting import timeout_when
from forebay.engines.read_json import UNREADABLE
from forebay.gateway.calls import EngineRefused, Json
from forebay.gateway.dialects.chunks import AnswerStream
from forebay.gateway.dialects.dialect import Dialect
from forebay.gateway.dialects.errors import ProtocolRefused
from forebay.gateway.engine_http import STREAM_TYPE, EngineReply, Headers
from forebay.gateway.refusals import EngineLost, GatewayRefusal
from forebay.gateway.streaming import ChatCall
from forebay.web.replies import JSON_HEADER, ClientGone, Header, encode, until_gone

TOO_DEEP = "the engine's answer is nested too deeply"

_decode_any = msgspec.json.Decoder().decode


class Exchange:
    """A chat that runs while the agent is connected."""

    def __init__(self, call: ChatCall, dialect: Dialect, body: Json) -> None:
        """``body`` is the body of the chat completion."""
        self._call = call
        self._dialect = dialect
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with while_connected(receive):
                if self._body.get("stream") is True:
                    await self._stream(send)
                    return
                content = encode(self._dialect.reply(await self._call.whole(self._body)))
                # Sent inside the block, so that an agent that does not read the reply is also watched.
                await raw_reply(HTTPStatus.OK, content, self._headers(JSON_HEADER))(scope, receive, send)
        except ClientGone:
            return
        except EngineRefused as refused:
            if self._dialect.is_engines_own:
                reply = refused.reply
                response = raw_reply(reply.status, reply.content, [*reply.headers, self._call.id_header])
            else:
                response = translated_error(self._dialect, refused.reply, self._call.id_header)
            await response(scope, receive, send)
        except GatewayRefusal as refusal:
            await refusal_reply(type(self._dialect), refusal, self._call.id_header)(scope, receive, send)
        except RecursionError:
            await refusal_reply(type(self._dialect), EngineLost(TOO_DEEP), self._call.id_header)(scope, receive, send)
        except ProtocolRefused as refused:  # from the translation of the engine's answer
            await json_reply(*self._dialect.refusal(refused), self._call.id_header)(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        """Stream the reply. Raises only errors from before the first chunk."""
        stream = self._dialect.stream()
        async with aclosing(self._call.stream(self._body)) as groups:
            # Errors can set the status only before the first byte, so wait for the first chunk.
            first: list[Json] = await anext(groups, [])
            headers = self._headers((b"content-type", STREAM_TYPE))
            await send({"type": "http.response.start", "status": HTTPStatus.OK.value, "headers": headers})
            try:
                await self._send_chunks(stream, first, send)
                async for chunks in groups:
                    await self._send_chunks(stream, chunks, send)
                last = self._event_bytes(stream.end())
            except (GatewayRefusal, RecursionError, EngineRefused) as error:
                refusal = _refusal_of(error)
                last = self._event_bytes(stream.fail(refusal.status, refusal.body()))
        await send({"type": "http.response.body", "body": last + self._dialect.after_stream})

    async def _send_chunks(self, stream: AnswerStream, chunks: list[Json], send: Send) -> None:
        # A translated chunk may yield no event.
        if data := b"".join(self._event_bytes(stream.feed(chunk)) for chunk in chunks):
            await send({"type": "http.response.body", "body": data, "more_body": True})

    def _event_bytes(self, events: list[Json]) -> bytes:
        return b"".join(map(self._dialect.event_bytes, events))

    def _headers(self, kind: Header) -> Headers:
        """The engine's headers, except for the content type if the protocol differs."""
        # A dict, so that the content type is replaced, not duplicated; of several cookies only the last remains.
        headers = dict(self._call.headers)
        headers.setdefault(*kind)
        if not self._dialect.is_engines_own:
            headers[kind[0]] = kind[1]
        return [*headers.items(), self._call.id_header]


def _refusal_of(error: Exception) -> GatewayRefusal:
    """Return the error that ends a stream that has begun."""
    if isinstance(error, GatewayRefusal):
        return error
    # The engine rejected the continuation of an aborted answer.
    return EngineLost(error.message if isinstance(error, EngineRefused) else TOO_DEEP)


class PassedOn:
    """A request to the engine other than a chat, with its reply unchanged or converted by ``read``."""

    def __init__(
        self,
        call: ChatCall,
        dialect: Dialect,
        method: str,
        path: str,
        content: bytes = b"",
        read: Callable[[Json], Json] | None = None,
    ) -> None:
        self._call = call
        self._dialect = dialect
        self._request = (method, path, content)
        self._read = read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with while_connected(receive):
                reply = await self._call.other(*self._request)
            response = self._response(reply)
        except ClientGone:
            return
        except GatewayRefusal as refusal:
            response = refusal_reply(type(self._dialect), refusal, self._call.id_header)
        await response(scope, receive, send)

    def _response(self, reply: EngineReply) -> Response:
        """Raises ``EngineLost``, which is also noted in the record."""
        if self._read is None:
            return raw_reply(reply.status, reply.content, [*reply.headers, self._call.id_header])
        if reply.status != HTTPStatus.OK:
            return translated_error(self._dialect, reply, self._call.id_header)
        try:
            return json_reply(reply.status, self._read(_decode_any(reply.content)), self._call.id_header)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError):
            lost = EngineLost(f"the engine sent a reply that cannot be read: {reply.content[:200]!r}")
            self._call.session.note_failure("engine", lost.status, lost.message)
            raise lost from None


def raw_reply(status: int, content: bytes, headers: Headers) -> Response:
    """Return a reply with exactly these headers and its length."""
    response = Response(content, status)
    response.raw_headers += headers  # as bytes: an engine may repeat a name, or send a value that is not latin-1
    return response


def json_reply(status: int, body: object, *headers: Header) -> Response:
    """Return ``body`` as JSON."""
    return raw_reply(status, encode(body), [JSON_HEADER, *headers])


def refusal_reply(kind: type[Dialect], refusal: GatewayRefusal, *headers: Header) -> Response:
    """Return the gateway's own error in the protocol's format."""
    return json_reply(*kind.error(refusal.status, refusal.body()), *headers)


def translated_error(dialect: Dialect, reply: EngineReply, *headers: Header) -> Response:
    """Return the engine's error in the protocol's format."""
    try:
        body = _decode_any(reply.content)
    except UNREADABLE:
        body = reply.content[:1_000].decode(errors="replace")
    return json_reply(*dialect.error(reply.status, body), *headers)


@asynccontextmanager
async def while_connected(receive: Receive) -> AsyncIterator[None]:
    """End the block with ``ClientGone`` when the client disconnects. The request's body must have been read."""
    try:
        async with timeout_when(until_gone(receive)) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise ClientGone from None
