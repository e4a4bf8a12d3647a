"""Chats over /generate of a router whose workers cannot be sent chats."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from forebay.core.errors import EngineError, EngineUnavailable
from forebay.engines.abc import ChatRequest
from forebay.engines.capture.reading import turns_of_chat
from forebay.engines.scripted import Reply, ScriptedEngine
from forebay.engines.scripted_tokens import TURN_END, encode, encode_chat
from forebay.engines.serving import serve_app
from forebay.engines.sglang import SGLangEngine

MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "look"}}]


def ask(**changes: Any) -> ChatRequest:
    return ChatRequest(messages=MESSAGES, **{"timeout_s": 10.0, **changes})


@asynccontextmanager
async def router_before(engine: ScriptedEngine, **listed: Any) -> AsyncIterator[str]:
    """It lists one worker as ``listed``, and passes calls on to ``engine``."""

    async def workers(_: Request) -> Response:
        return JSONResponse({"workers": [{"url": engine.url, "is_healthy": True, **listed}]})

    async def passed_on(request: Request) -> Response:
        async with httpx.AsyncClient() as http:
            reply = await http.post(engine.url + request.url.path, content=await request.body())
        return Response(reply.content, reply.status_code, media_type="application/json")

    paths = ("/generate", "/v1/chat/completions")
    routes = [Route("/workers", workers), *(Route(path, passed_on, methods=["POST"]) for path in paths)]
    async with serve_app(Starlette(routes=routes)) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(lambda call: f"answer {call.choice}") as engine:
        yield engine


async def test_a_chat_tells_its_tokens_though_no_worker_takes_chats(engine: ScriptedEngine) -> None:
    params = {"max_tokens": 64, "temperature": 1.0}
    async with (
        router_before(engine, connection_mode="grpc") as url,
        SGLangEngine(url, model="m", render=encode_chat) as client,
    ):
        reply = await client.chat(ask(sampling_params=params, rid="r-1", n=2))
    assert (reply.texts, reply.finish_reason, reply.rid) == (["answer 0", "answer 1"], "stop", "r-1")
    one, two = turns_of_chat({"messages": MESSAGES}, reply.raw)
    assert one.prompt_ids == encode_chat(MESSAGES)
    assert two.sampled_ids == [*encode("answer 1"), TURN_END]
    assert two.logprobs is not None
    assert [span.version for span in one.versions] == ["default"]
    assert engine.calls[0].body["sampling_params"]["max_new_tokens"] == 64


@pytest.mark.parametrize(
    "changes", [{"tools": TOOLS}, {"extra": {"chat_template_kwargs": {}}}, {"continue_final_message": True}]
)
async def test_what_generate_does_not_know_is_asked_as_a_chat(engine: ScriptedEngine, changes: dict[str, Any]) -> None:
    async with (
        router_before(engine, connection_mode="grpc") as url,
        SGLangEngine(url, model="m", render=encode_chat) as client,
    ):
        await client.chat(ask(**changes))
    assert "messages" in engine.calls[0].body
    assert "input_ids" not in engine.calls[0].body


async def test_workers_that_cannot_be_reached_are_passed_by(engine: ScriptedEngine, free_port: int) -> None:
    worker = f"http://127.0.0.1:{free_port}"
    async with router_before(engine, url=worker) as url:
        async with SGLangEngine(url, model="m", render=encode_chat) as client:
            assert (await client.chat(ask())).text == "answer 0"
            with pytest.raises(EngineUnavailable):
                await client.chat(ask(tools=TOOLS))
        async with SGLangEngine(url, model="m") as client:
            with pytest.raises(EngineUnavailable):
                await client.chat(ask())


async def test_errors_are_those_of_a_chat() -> None:
    async with (
        ScriptedEngine(lambda _: Reply(text="too long", error_status=400)) as engine,
        router_before(engine, connection_mode="grpc") as url,
        SGLangEngine(url, model="m", render=encode_chat) as client,
    ):
        with pytest.raises(EngineError, match="too long") as caught:
            await client.chat(ask())
    assert caught.value.status_code == 400
