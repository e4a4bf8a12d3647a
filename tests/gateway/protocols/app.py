"""A little application that speaks both protocols in front of an engine: the translation and nothing else."""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from forebay.gateway.dialects import anthropic, responses
from forebay.gateway.dialects.chunks import event_bytes

Json = dict[str, Any]
Stream = anthropic.MessagesStream | responses.ResponsesStream
Errors = Callable[[int, object], tuple[int, Json]]


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
            exception_handlers={anthropic.MessagesRefused: _refused, responses.ResponsesRefused: _refused},
        )

    def begin(self, *, remembers: bool = True) -> None:
        """Begin a new rollout."""
        self.chats: list[Json] = []
        self.memo = anthropic.ReplyMemo() if remembers else None
        self.store = responses.ResponseStore()

    async def close(self) -> None:
        await self._engine.aclose()

    async def _messages(self, request: Request) -> Response:
        body = await request.json()
        chat = anthropic.to_chat(body, self.memo)
        if body.get("stream"):
            return await self._streamed(chat, anthropic.MessagesStream(body, self.memo), anthropic.messages_error)
        reply = await self._asked("/v1/chat/completions", chat)
        if reply.is_error:
            return _error(reply, anthropic.messages_error)
        return JSONResponse(anthropic.from_chat(reply.json(), body, self.memo))

    async def _count_tokens(self, request: Request) -> Response:
        reply = await self._asked("/tokenize", anthropic.to_tokenize(await request.json(), self.memo))
        return (
            _error(reply, anthropic.messages_error)
            if reply.is_error
            else JSONResponse(anthropic.from_tokenize(reply.json()))
        )

    async def _responses(self, request: Request) -> Response:
        body = await request.json()
        chat = responses.to_chat(body, self.store, self.memo)
        if body.get("stream"):
            return await self._streamed(
                chat, responses.ResponsesStream(body, self.store, self.memo), responses.responses_error
            )
        reply = await self._asked("/v1/chat/completions", chat)
        if reply.is_error:
            return _error(reply, responses.responses_error)
        return JSONResponse(responses.from_chat(reply.json(), body, self.store, self.memo))

    async def _stored(self, request: Request) -> Response:
        given = self.store.delete if request.method == "DELETE" else self.store.get
        return JSONResponse(given(request.path_params["response_id"]))

    async def _asked(self, path: str, body: Json) -> httpx.Response:
        self.chats.append(body)
        return await self._engine.post(path, json=body)

    async def _streamed(self, chat: Json, stream: Stream, errors: Errors) -> Response:
        self.chats.append(chat)
        request = self._engine.build_request("POST", "/v1/chat/completions", json=chat)
        reply = await self._engine.send(request, stream=True)
        if reply.is_error:
            await reply.aread()
            return _error(reply, errors)
        return StreamingResponse(_events(reply, stream), media_type="text/event-stream")


async def _events(reply: httpx.Response, stream: Stream) -> AsyncIterator[bytes]:
    async for line in reply.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            for event in stream.feed(json.loads(line.removeprefix("data: "))):
                yield event_bytes(event)
    for event in stream.end():
        yield event_bytes(event)
    await reply.aclose()


def _error(reply: httpx.Response, errors: Errors) -> Response:
    status, body = errors(reply.status_code, reply.json())
    return JSONResponse(body, status)


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, anthropic.MessagesRefused | responses.ResponsesRefused)
    return JSONResponse(error.body, error.status)
