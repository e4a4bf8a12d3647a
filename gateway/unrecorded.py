"""Text completions and embeddings: forwarded to the engine within the rollout's limits, and not recorded.

A sample is a conversation of messages, which these are not. The rollout's ``notes`` count them.
"""

from contextlib import suppress
from functools import partial
from http import HTTPStatus

import msgspec
from starlette.types import Receive, Scope, Send

from forebay.core.errors import EngineUnavailable
from forebay.engines.capture.request_fields import texts_only
from forebay.engines.read_json import read_object
from forebay.engines.router_workers import UNAVAILABLE_STATUSES, status_error
from forebay.gateway.asgi_calls import raw_reply, refusal_reply, while_connected
from forebay.gateway.calls import EngineCall, EngineRefused, Json, check_status
from forebay.gateway.dialects.dialect import ChatDialect
from forebay.gateway.engine_http import DONE, DONE_DATA, STREAM_TYPE, EngineReply, Headers, IncomingReply, event
from forebay.gateway.off_loop import off_loop
from forebay.gateway.refusals import GatewayRefusal
from forebay.gateway.runs.run import GatewayRun
from forebay.gateway.runs.sessions import Session
from forebay.web.replies import ClientGone, encode

COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
ANSWER = "JSON object"

_decode = msgspec.json.Decoder(Json).decode


class UnrecordedCall(EngineCall):
    """One unrecorded call of a session, as an ASGI application. Use it once."""

    def __init__(
        self, run: GatewayRun, session: Session, path: str, body: Json, traceparent: str | None = None
    ) -> None:
        super().__init__(run, session, traceparent)
        self._path = path
        # An embedding samples no tokens to limit.
        self._body = session.prepared(body) if path == COMPLETIONS else body
        self._is_begun = False
        """Whether any part of the reply was sent."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with while_connected(receive), self._counted():
                await self._pass_on(scope, receive, send)
        except ClientGone:
            return
        except GatewayRefusal as refusal:
            if self._is_begun:
                last = event(refusal.body()) + DONE
                await send({"type": "http.response.body", "body": last})
            else:
                await refusal_reply(ChatDialect, refusal, self.id_header)(scope, receive, send)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        while True:
            try:
                reply = await self._asked(send)
                break
            except EngineUnavailable as error:
                await self._wait_before_retry(error, is_begun=self._is_begun)
        if reply is not None:
            await raw_reply(reply.status, _cleaned(reply.content), self._shown(reply.headers))(scope, receive, send)

    async def _asked(self, send: Send) -> EngineReply | None:
        """Return the engine's whole reply; None for a stream, which was forwarded. Raises ``EngineUnavailable``."""
        with self.session.trace.engine_wait(self._up):
            member, rid = await self.session.choose_engine(), self.session.next_rid()
        # The `rid` makes the request abortable.
        body = member.server.dialect.named(self._body, rid)
        async with self._reply(member, rid, self._path, body) as (incoming, span):
            check_status(incoming.status)
            if incoming.status == HTTPStatus.OK:
                member.recovered()
                if dict(incoming.headers).get(b"content-type", b"").startswith(STREAM_TYPE):
                    await self._stream(incoming, send)
                    span.end(path=self._path)
                    return None
            reply = await incoming.whole()
            if reply.status in UNAVAILABLE_STATUSES:  # the engine backs off, and the next one is asked
                raise status_error(member.server.url, reply.status, reply.content)
            span.end(path=self._path, status=reply.status)
        if reply.status >= HTTPStatus.BAD_REQUEST:
            refused = EngineRefused(reply)
            self.session.note_failure(refused.kind, reply.status, refused.message)
        else:
            await off_loop(partial(read_object, what=ANSWER), reply.content)
        return reply

    async def _stream(self, incoming: IncomingReply, send: Send) -> None:
        headers = self._shown(incoming.headers)
        await send({"type": "http.response.start", "status": incoming.status, "headers": headers})
        self._is_begun = True
        async for data in incoming.events():
            if data != DONE_DATA:
                read_object(data, ANSWER)
            content = DONE if data == DONE_DATA else b"data: %b\n\n" % _cleaned(data)
            await send({"type": "http.response.body", "body": content, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    def _shown(self, headers: Headers) -> Headers:
        return [*headers, self.id_header]


def _cleaned(content: bytes) -> bytes:
    """Make the metadata of a body or event acceptable to strict clients; anything else stays byte for byte."""
    if b'"metadata"' in content:
        with suppress(msgspec.DecodeError):
            return encode(texts_only(_decode(content)))
    return content
