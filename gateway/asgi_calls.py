"""One request of an agent and its reply, in whatever protocol.

``Exchange`` makes a chat, ``PassedOn`` any other request to the engine; both are ASGI applications that a route
returns, and that end the engine's work when the agent goes away.
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

TOO_DEEP = "the engine's answer is nested too deep"

_decode_any = msgspec.json.Decoder().decode


class Exchange:
    """A chat that is made while the agent is there to hear its answer."""

    def __init__(self, call: ChatCall, dialect: Dialect, body: Json) -> None:
        """``body`` is that of the chat completion."""
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
                # Sent in here: who does not read the reply is watched too.
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
        except ProtocolRefused as refused:  # by the translation of what the engine answered
            await json_reply(*self._dialect.refusal(refused), self._call.id_header)(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        """Raises only what is raised before the first chunk."""
        stream = self._dialect.stream()
        async with aclosing(self._call.stream(self._body)) as groups:
            # The status can be told apart only until the first byte has gone: it waits for the first chunk.
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
        # In a translation a chunk may stand for no event.
        if data := b"".join(self._event_bytes(stream.feed(chunk)) for chunk in chunks):
            await send({"type": "http.response.body", "body": data, "more_body": True})

    def _event_bytes(self, events: list[Json]) -> bytes:
        return b"".join(map(self._dialect.event_bytes, events))

    def _headers(self, kind: Header) -> Headers:
        """The engine's own, but for its content type where the protocol is another one."""
        # By name, so that the content type is replaced and not doubled; of several cookies the last one is left.
        headers = dict(self._call.headers)
        headers.setdefault(*kind)
        if not self._dialect.is_engines_own:
            headers[kind[0]] = kind[1]
        return [*headers.items(), self._call.id_header]


def _refusal_of(error: Exception) -> GatewayRefusal:
    """What ends a stream that has begun."""
    if isinstance(error, GatewayRefusal):
        return error
    # Refused by the engine is the rest of an answer that was aborted.
    return EngineLost(error.message if isinstance(error, EngineRefused) else TOO_DEEP)


class PassedOn:
    """A request to the engine that is no chat, and its reply: as it is, or as ``read`` has it."""

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
        """Raises ``EngineLost``, which is noted in the record."""
        if self._read is None:
            return raw_reply(reply.status, reply.content, [*reply.headers, self._call.id_header])
        if reply.status != HTTPStatus.OK:
            return translated_error(self._dialect, reply, self._call.id_header)
        try:
            return json_reply(reply.status, self._read(_decode_any(reply.content)), self._call.id_header)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError):
            lost = EngineLost(f"the engine answers what cannot be read: {reply.content[:200]!r}")
            self._call.session.note_failure("engine", lost.status, lost.message)
            raise lost from None


def raw_reply(status: int, content: bytes, headers: Headers) -> Response:
    """A reply with exactly these headers, and its length."""
    response = Response(content, status)
    response.raw_headers += headers  # as bytes: an engine may send one name twice, or a value that is no latin-1
    return response


def json_reply(status: int, body: object, *headers: Header) -> Response:
    """``body`` as JSON."""
    return raw_reply(status, encode(body), [JSON_HEADER, *headers])


def refusal_reply(kind: type[Dialect], refusal: GatewayRefusal, *headers: Header) -> Response:
    """The gateway's own error, in the words of the protocol."""
    return json_reply(*kind.error(refusal.status, refusal.body()), *headers)


def translated_error(dialect: Dialect, reply: EngineReply, *headers: Header) -> Response:
    """The engine's error, in the words of the protocol."""
    try:
        body = _decode_any(reply.content)
    except UNREADABLE:
        body = reply.content[:1_000].decode(errors="replace")
    return json_reply(*dialect.error(reply.status, body), *headers)


@asynccontextmanager
async def while_connected(receive: Receive) -> AsyncIterator[None]:
    """Ends what is inside with ``ClientGone`` when the client goes away. Its body must have been read."""
    try:
        async with timeout_when(until_gone(receive)) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise ClientGone from None
