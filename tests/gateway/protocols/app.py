"""A little application that speaks both protocols in front of an engine: the translation and nothing else."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from forebay.gateway.dialects.anthropic.from_chat import from_tokenize
from forebay.gateway.dialects.anthropic.to_chat import to_tokenize
from forebay.gateway.dialects.dialect import CrossCallState, Dialect, MessagesDialect, ResponsesDialect
from forebay.gateway.dialects.errors import ProtocolRefused

Json = dict[str, Any]


class ProtocolApp:
    """One rollout at a time: what it has sent to the engine is in ``chats``."""

    def __init__(self, engine_url: str) -> None:
        self.begin()
        self._engine = httpx.AsyncClient(base_url=engine_url, timeout=60)
        self.routes = Starlette(
            routes=[
                Route("/v1/messages", self._messages, methods=["POST"]),
                Route("/v1/messages/count_tokens", self._count_tokens, methods=["POST"]),
                Route("/v1/responses", self._responses, methods=["POST"]),
                Route("/v1/responses/{response_id}", self._stored, methods=["GET", "DELETE"]),
            ],
        )

    def begin(self, *, remembers: bool = True) -> None:
        """Begin a new rollout."""
        self.chats: list[Json] = []
        self.remembers = remembers
        self.memory = CrossCallState()

    async def close(self) -> None:
        await self._engine.aclose()

    async def _messages(self, request: Request) -> Response:
        return await self._answered(request, MessagesDialect)

    async def _responses(self, request: Request) -> Response:
        return await self._answered(request, ResponsesDialect)

    async def _answered(self, request: Request, kind: type[Dialect]) -> Response:
        body, dialect = await request.json(), kind(self.memory if self.remembers else CrossCallState())
        try:
            chat = dialect.to_chat(body)
        except ProtocolRefused as refused:
            return _told(*kind.refusal(refused))
        self.chats.append(chat)
        sent = self._engine.build_request("POST", "/v1/chat/completions", json=chat)
        reply = await self._engine.send(sent, stream=True)
        if body.get("stream") and not reply.is_error:
            return StreamingResponse(_events(reply, dialect), media_type="text/event-stream")
        await reply.aread()
        if reply.is_error:
            return _told(*kind.error(reply.status_code, reply.json()))
        try:
            return JSONResponse(dialect.reply(reply.json()))
        except ProtocolRefused as refused:
            return _told(*kind.refusal(refused))

    async def _count_tokens(self, request: Request) -> Response:
        dialect = MessagesDialect(self.memory)
        body = to_tokenize(await request.json(), dialect.memory.memo, dialect.unknown)
        self.chats.append(body)
        reply = await self._engine.post("/tokenize", json=body)
        if reply.is_error:
            return _told(*dialect.error(reply.status_code, reply.json()))
        return JSONResponse(from_tokenize(reply.json()))

    async def _stored(self, request: Request) -> Response:
        store = self.memory.store
        try:
            given = store.delete if request.method == "DELETE" else store.get
            return JSONResponse(given(request.path_params["response_id"]))
        except ProtocolRefused as refused:
            return _told(*ResponsesDialect.refusal(refused))


async def _events(reply: httpx.Response, dialect: Dialect) -> AsyncIterator[bytes]:
    stream = dialect.stream()
    async for line in reply.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            for event in stream.feed(json.loads(line.removeprefix("data: "))):
                yield dialect.event_bytes(event)
    for event in stream.end():
        yield dialect.event_bytes(event)
    await reply.aclose()


def _told(status: int, body: Json) -> Response:
    return JSONResponse(body, status)
