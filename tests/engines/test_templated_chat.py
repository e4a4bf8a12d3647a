"""Chats over /generate of a router whose workers cannot be sent chats."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from forebay.core.clock import ManualClock
from forebay.core.errors import EngineError, EngineUnavailable
from forebay.engines.abc import ChatRequest
from forebay.engines.admin import admin_client
from forebay.engines.capture.read_reply import turns_of_chat
from forebay.engines.scripted import Reply, ScriptedEngine
from forebay.engines.scripted.tokens import TURN_END, encode, encode_chat
from forebay.engines.sglang import ASK_AGAIN_S, Reach, SGLangEngine
from tests.engines.template_kit import TEMPLATE, hiding_router

MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "look"}}]
PARAMS = {"max_tokens": 64, "temperature": 1.0}


def ask(**changes: Any) -> ChatRequest:
    return ChatRequest(**{"messages": MESSAGES, "timeout_s": 10.0, "sampling_params": PARAMS, **changes})


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(lambda call: f"answer {call.choice}") as engine:
        yield engine


async def test_a_chat_tells_its_tokens_though_no_worker_takes_chats(engine: ScriptedEngine) -> None:
    async with (
        hiding_router(engine.url, connection_mode="grpc") as (_, url),
        SGLangEngine(url, model="m", template=TEMPLATE) as client,
    ):
        reply = await client.chat(ask(rid="r-1", n=2))
    assert (reply.texts, reply.finish_reason, reply.rid) == (["answer 0", "answer 1"], "stop", "r-1")
    one, two = turns_of_chat({"messages": MESSAGES}, reply.raw)
    assert one.prompt_ids == encode_chat(MESSAGES)
    assert two.sampled_ids == [*encode("answer 1"), TURN_END]
    assert two.logprobs is not None
    assert [span.version for span in one.versions] == ["default"]
    assert engine.calls[0].body["sampling_params"]["max_new_tokens"] == 64


@pytest.mark.parametrize(
    "changes",
    [
        {"tools": TOOLS},
        {"extra": {"chat_template_kwargs": {"enable_thinking": False}}},
        {"continue_final_message": True},
        {"sampling_params": {"temperature": 1.0}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
        {"messages": [*MESSAGES, {"role": "tool", "tool_call_id": "1", "content": "x"}]},
    ],
)
async def test_what_generate_does_not_know_is_asked_as_a_chat(engine: ScriptedEngine, changes: dict[str, Any]) -> None:
    async with (
        hiding_router(engine.url, connection_mode="grpc") as (router, url),
        SGLangEngine(url, model="m", template=TEMPLATE) as client,
    ):
        await client.chat(ask(**changes))
    assert router.asked == ["/v1/chat/completions"]


async def test_fields_that_say_nothing_keep_nobody_from_generate(engine: ScriptedEngine) -> None:
    extra = {"tools": [], "stream": False, "response_format": None, "seed": None, "stop": "x"}
    async with (
        hiding_router(engine.url, connection_mode="grpc") as (router, url),
        SGLangEngine(url, model="m", template=TEMPLATE) as client,
    ):
        await client.chat(ask(extra=extra))
    assert router.asked == ["/generate"]
    assert engine.calls[0].body["sampling_params"]["stop"] == "x"


async def test_workers_that_cannot_be_reached_are_passed_by(engine: ScriptedEngine, free_port: int) -> None:
    worker = f"http://127.0.0.1:{free_port}"
    async with hiding_router(engine.url, url=worker) as (router, url):
        async with SGLangEngine(url, model="m", template=TEMPLATE) as client:
            assert (await client.chat(ask())).text == "answer 0"
            assert (await client.chat(ask(tools=TOOLS))).text == "answer 0"
            assert router.asked == ["/generate", "/v1/chat/completions"]
            assert await client.is_available()
            assert client.is_through_router
        async with SGLangEngine(url, model="m") as client:
            with pytest.raises(EngineUnavailable):
                await client.chat(ask())


async def test_workers_that_can_be_reached_are_asked_themselves(engine: ScriptedEngine) -> None:
    async with (
        hiding_router(engine.url) as (router, url),
        SGLangEngine(url, model="m", template=TEMPLATE) as client,
    ):
        await client.chat(ask())
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


async def test_errors_are_those_of_a_chat() -> None:
    async with (
        ScriptedEngine(lambda _: Reply(text="too long", error_status=400)) as engine,
        hiding_router(engine.url, connection_mode="grpc") as (_, url),
        SGLangEngine(url, model="m", template=TEMPLATE) as client,
    ):
        with pytest.raises(EngineError, match="too long") as caught:
            await client.chat(ask())
    assert caught.value.status_code == 400
