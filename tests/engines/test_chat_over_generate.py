"""Chats over /generate of a router whose workers cannot be sent chats."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest

from forebay.core.clock import ManualClock
from forebay.core.errors import EngineError
from forebay.engines.capture.read_reply import turns_of_chat
from forebay.engines.chat_over_generate import as_chat, generate_body, rendered
from forebay.engines.router_workers import admin_client
from forebay.engines.scripted import ScriptedEngine
from forebay.engines.scripted.tokens import TURN_END, encode, encode_chat
from forebay.engines.sglang import ASK_AGAIN_S, Reach, SGLangEngine
from tests.engines.template_kit import TEMPLATE, hiding_router

MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "look"}}]
PARAMS = {"max_tokens": 64, "temperature": 1.0}


async def ask(client: SGLangEngine, **changes: Any) -> dict[str, Any]:
    """The reply to one chat, sent where a rollout's chat would be sent."""
    body = {"model": "m", "messages": MESSAGES, **PARAMS, **changes}
    (url, *_) = await client.workers()
    prompt_ids = rendered(body, TEMPLATE) if client.is_through_router else None
    async with httpx.AsyncClient(timeout=30) as http:
        if prompt_ids is None:
            content = (await http.post(f"{url}/v1/chat/completions", json=body)).content
        else:
            reply = await http.post(f"{url}/generate", json=generate_body(body, prompt_ids))
            content = as_chat(reply.content, body, prompt_ids, TEMPLATE)
    answer: dict[str, Any] = msgspec.json.decode(content)
    return answer


def texts(reply: dict[str, Any]) -> list[str]:
    return [choice["message"]["content"] for choice in reply["choices"]]


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(lambda call: f"answer {call.choice}") as engine:
        yield engine


async def test_a_chat_tells_its_tokens_though_no_worker_takes_chats(engine: ScriptedEngine) -> None:
    async with (
        hiding_router(engine.url, connection_mode="grpc") as (_, url),
        SGLangEngine(url, model="m", template=TEMPLATE) as client,
    ):
        reply = await ask(client, rid="r-1", n=2)
    assert texts(reply) == ["answer 0", "answer 1"]
    assert [choice["finish_reason"] for choice in reply["choices"]] == ["stop", "stop"]
    one, two = turns_of_chat({"messages": MESSAGES}, reply)
    assert one.prompt_ids == encode_chat(MESSAGES)
    assert two.sampled_ids == [*encode("answer 1"), TURN_END]
    assert two.logprobs is not None
    assert [span.version for span in one.versions] == ["default"]
    assert engine.calls[0].body["sampling_params"]["max_new_tokens"] == 64


@pytest.mark.parametrize(
    "changes",
    [
        {"tools": TOOLS},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"continue_final_message": True, "add_generation_prompt": False},
        {"max_tokens": None},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
        {"messages": [*MESSAGES, {"role": "tool", "tool_call_id": "1", "content": "x"}]},
    ],
)
async def test_what_generate_does_not_know_is_asked_as_a_chat(engine: ScriptedEngine, changes: dict[str, Any]) -> None:
    async with (
        hiding_router(engine.url, connection_mode="grpc") as (router, url),
        SGLangEngine(url, model="m", template=TEMPLATE) as client,
    ):
        await ask(client, **changes)
    assert router.asked == ["/v1/chat/completions"]


async def test_fields_that_say_nothing_keep_nobody_from_generate(engine: ScriptedEngine) -> None:
    extra = {"tools": [], "stream": False, "response_format": None, "seed": None, "stop": "x"}
    async with (
        hiding_router(engine.url, connection_mode="grpc") as (router, url),
        SGLangEngine(url, model="m", template=TEMPLATE) as client,
    ):
        await ask(client, **extra)
    assert router.asked == ["/generate"]
    assert engine.calls[0].body["sampling_params"]["stop"] == "x"


async def test_workers_that_cannot_be_reached_are_passed_by(engine: ScriptedEngine, free_port: int) -> None:
    worker = f"http://127.0.0.1:{free_port}"
    async with hiding_router(engine.url, url=worker) as (router, url):
        async with SGLangEngine(url, model="m", template=TEMPLATE) as client:
            assert texts(await ask(client)) == ["answer 0"]
            assert texts(await ask(client, tools=TOOLS)) == ["answer 0"]
            assert router.asked == ["/generate", "/v1/chat/completions"]
            assert await client.is_available()
            assert client.is_through_router
        async with SGLangEngine(url, model="m") as client:
            assert await client.workers() == [worker]
            assert not client.is_through_router


async def test_workers_that_can_be_reached_are_asked_themselves(engine: ScriptedEngine) -> None:
    async with (
        hiding_router(engine.url) as (router, url),
        SGLangEngine(url, model="m", template=TEMPLATE) as client,
    ):
        await ask(client)
        assert await client.workers() == [engine.url]
    assert router.asked == []


async def test_reach_is_kept_for_those_that_answered_and_asked_again_for_the_others(free_port: int) -> None:
    clock, closed = ManualClock(), f"http://127.0.0.1:{free_port}"
    async with admin_client(None) as http:
        reach = Reach(http, clock)
        async with ScriptedEngine(lambda _: "x") as engine:
            opened = engine.url
            assert await reach.among([opened, closed]) == {opened}
        clock.advance(ASK_AGAIN_S + 1)
        assert await reach.among([opened, closed]) == {opened}, "one that is down was reachable all the same"
        async with ScriptedEngine(lambda _: "x", port=free_port):
            assert await reach.among([closed]) == set()
            clock.advance(ASK_AGAIN_S + 1)
            assert await reach.among([closed]) == {closed}


def test_what_is_no_reply_is_an_engine_error() -> None:
    for content in (b"no JSON", b"{}", b"[]", b'{"text": "x"}'):
        with pytest.raises(EngineError, match="cannot be read as completion"):
            as_chat(content, {"messages": MESSAGES}, [1], TEMPLATE)
