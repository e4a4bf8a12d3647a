"""One request of an agent and its reply, in whatever protocol."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from http import HTTPStatus

import msgspec
from starlette.types import Receive, Scope, Send

from forebay.gateway.calls import Json
from forebay.gateway.dialects.dialect import REFUSED, ChatDialect, Dialect, Stream
from forebay.gateway.engine_http import STREAM_TYPE, Answer, Headers
from forebay.gateway.engine_request import EngineRefused
from forebay.gateway.refusals import EngineLost, Refusal
from forebay.gateway.streaming import ChatCall
from forebay.web.replies import JSON_HEADER, ClientGone, Header, encode

logger = logging.getLogger(__name__)

ID_HEADER = b"x-forebay-rollout-id"
"""The one header that an engine's own reply has not."""

_decode_any = msgspec.json.Decoder().decode


class Reply:
    """A reply that is known: an ASGI application."""

    def __init__(self, status: int, content: bytes, headers: Headers) -> None:
        self._status = status
        self._content = content
        self._headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's signature
        length = (b"content-length", b"%d" % len(self._content))
        await send({"type": "http.response.start", "status": self._status, "headers": [*self._headers, length]})
        await send({"type": "http.response.body", "body": self._content})


class Exchange:
    """A call that is made while the agent is there to hear its answer: an ASGI application."""

    def __init__(self, call: ChatCall, dialect: Dialect, body: Json) -> None:
        """``body`` is that of the chat completion."""
        self._call = call
        self._dialect = dialect
        self._body = body
        self._id_header = (ID_HEADER, call.session.session_id.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with while_connected(receive):
                if self._body.get("stream") is True:
                    await self._stream(send)
                else:
                    told = self._dialect.reply(await self._call.whole(self._body))
                    await Reply(HTTPStatus.OK, encode(told), self._headers(JSON_HEADER))(scope, receive, send)
        except ClientGone:
            return
        except EngineRefused as refused:
            await self._passed_on(refused)(scope, receive, send)
        except Refusal as refusal:
            await refused_with(type(self._dialect), refusal, self._id_header)(scope, receive, send)
        except REFUSED as refused:  # by the translation of what the engine answered
            await json_reply(refused.status, refused.body, self._id_header)(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        """Raises only what is raised before the first chunk."""
        stream = self._dialect.stream()
        async with aclosing(self._call.stream(self._body)) as chunks:
            first: list[Json] = await anext(chunks, [])
            start = {"type": "http.response.start", "status": HTTPStatus.OK.value}
            await send({**start, "headers": self._headers((b"content-type", STREAM_TYPE))})
            try:
                await self._send_chunks(stream, first, chunks, send)
                last = stream.end()
            except Refusal as refusal:
                last = stream.fail(refusal)
            except EngineRefused as refused:  # of the rest of an answer that was aborted
                last = stream.fail(EngineLost(refused.told))
        await send({"type": "http.response.body", "body": last})

    async def _send_chunks(
        self, stream: Stream, first: list[Json], chunks: AsyncIterator[list[Json]], send: Send
    ) -> None:
        await self._send(stream, first, send)
        async for some in chunks:
            await self._send(stream, some, send)

    async def _send(self, stream: Stream, chunks: list[Json], send: Send) -> None:
        if data := b"".join(map(stream.feed, chunks)):
            await send({"type": "http.response.body", "body": data, "more_body": True})

    def _headers(self, kind: Header) -> Headers:
        """The engine's own, but for its content type where the protocol is another one."""
        told = dict(self._call.headers)
        told.setdefault(*kind)
        if not self._dialect.is_engines_own:
            told[kind[0]] = kind[1]
        return [*told.items(), self._id_header]

    def _passed_on(self, refused: EngineRefused) -> Reply:
        """The engine's reply; translated if it is one that can be."""
        answer = refused.answer
        if self._dialect.is_engines_own:
            return Reply(answer.status, answer.content, [*answer.headers, self._id_header])
        return translated_error(self._dialect, answer, self._id_header)


class PassedOn:
    """A request to the engine that is no chat, and its reply as it is, or as ``read`` has it: an ASGI application."""

    def __init__(
        self,
        call: ChatCall,
        method: str,
        path: str,
        content: bytes = b"",
        dialect: Dialect | None = None,
        read: Callable[[Json], Json] | None = None,
    ) -> None:
        self._call = call
        self._asked = (method, path, content)
        self._dialect = dialect
        self._read = read
        self._id_header = (ID_HEADER, call.session.session_id.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with while_connected(receive):
                answer = await self._call.other(*self._asked)
            reply = self._reply(answer)
        except ClientGone:
            return
        except Refusal as refusal:
            reply = refused_with(
                ChatDialect if self._dialect is None else type(self._dialect), refusal, self._id_header
            )
        await reply(scope, receive, send)

    def _reply(self, answer: Answer) -> Reply:
        if self._dialect is None or self._read is None:
            return Reply(answer.status, answer.content, [*answer.headers, self._id_header])
        if answer.status != HTTPStatus.OK:
            return translated_error(self._dialect, answer, self._id_header)
        try:
            told = self._read(_decode_any(answer.content))
        except (msgspec.DecodeError, LookupError, TypeError, AttributeError):
            raise EngineLost(f"the engine answers what cannot be read: {answer.content[:200]!r}") from None
        return json_reply(answer.status, told, self._id_header)


def json_reply(status: int, body: object, *headers: Header) -> Reply:
    """``body`` as JSON."""
    return Reply(status, encode(body), [JSON_HEADER, *headers])


def refused_with(kind: type[Dialect], refusal: Refusal, *headers: Header) -> Reply:
    """The gateway's own error, in the words of the protocol."""
    return json_reply(*kind.error(refusal.status, refusal.body()), *headers)


def translated_error(dialect: Dialect, answer: Answer, *headers: Header) -> Reply:
    """The engine's error, in the words of the protocol."""
    try:
        body = _decode_any(answer.content)
    except msgspec.DecodeError:
        body = answer.content[:1_000].decode(errors="replace")
    return json_reply(*dialect.error(answer.status, body), *headers)


@asynccontextmanager
async def while_connected(receive: Receive) -> AsyncIterator[None]:
    """Ends what is inside with ``ClientGone`` when the client goes away. Its body must have been read."""
    try:
        async with asyncio.timeout(None) as until_gone:
            watching = asyncio.create_task(_watch(receive, until_gone))
            try:
                yield
            finally:
                watching.cancel()
    except TimeoutError:
        if not until_gone.expired():
            raise
        raise ClientGone from None


async def _watch(receive: Receive, until_gone: asyncio.Timeout) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    until_gone.reschedule(asyncio.get_running_loop().time())
