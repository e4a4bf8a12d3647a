"""What every engine client promises, shown for each kind over a real socket."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from forebay.core.errors import EngineError, EngineUnavailable, InvalidInput
from forebay.engines.abc import ChatRequest, Engine, EngineLoad
from forebay.engines.connect import connect
from forebay.engines.detect import DetectedEngine
from forebay.engines.openai import OpenAIEngine
from forebay.engines.pool import EnginePool
from forebay.engines.scripted import Reply, ScriptedEngine
from forebay.engines.scripted.tokens import encode_chat
from forebay.engines.sglang import SGLangEngine

KINDS: dict[str, Callable[[str], Engine]] = {
    "openai": OpenAIEngine,
    "sglang": SGLangEngine,
    "detected": DetectedEngine,
    "pool": lambda url: EnginePool([url]),
    "connect": connect,
}
ABORTING = sorted(KINDS.keys() - {"openai"})


def ask(prompt: str = "hi", **other: Any) -> ChatRequest:
    return ChatRequest(messages=[{"role": "user", "content": prompt}], **{"timeout_s": 10.0, **other})


@pytest.fixture(params=sorted(KINDS))
def make(request: pytest.FixtureRequest) -> Callable[[str], Engine]:
    return KINDS[request.param]


async def test_chat_gives_text_counts_and_the_raw_body(make: Callable[[str], Engine]) -> None:
    async with ScriptedEngine(lambda call: f"four {call.prompt}") as server, make(server.url) as engine:
        reply = await engine.chat(ask("two words", sampling_params={"max_tokens": 70, "temperature": 0.5, "top_k": 3}))
        assert (reply.text, reply.message["role"], reply.finish_reason) == ("four two words", "assistant", "stop")
        assert reply.prompt_tokens == len(encode_chat([{"role": "user", "content": "two words"}]))
        assert reply.completion_tokens == len("four two words") + 1
        assert reply.raw["object"] == "chat.completion"
        assert not reply.aborted
        body = server.calls[0].body
        assert (body["max_tokens"], body["temperature"], body["top_k"], body["model"]) == (70, 0.5, 3, "scripted")


async def test_n_tools_extra_and_continuation_reach_the_server(make: Callable[[str], Engine]) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    request = ask(n=2, tools=tools, extra={"return_token_ids": True}, continue_final_message=True)
    async with ScriptedEngine(lambda call: str(call.choice)) as server, make(server.url) as engine:
        assert (await engine.chat(request)).texts == ["0", "1"]
        body = server.calls[0].body
        assert (body["n"], body["tools"], body["return_token_ids"]) == (2, tools, True)
        assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)


async def test_tool_calls_come_back_in_the_message(make: Callable[[str], Engine]) -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}]
    async with ScriptedEngine(lambda _: Reply(tool_calls=calls)) as server, make(server.url) as engine:
        reply = await engine.chat(ask())
    assert (reply.message["tool_calls"], reply.text, reply.finish_reason) == (calls, "", "tool_calls")


async def test_address_with_v1_is_the_same_address(make: Callable[[str], Engine]) -> None:
    async with ScriptedEngine(lambda _: "x") as server, make(f"{server.url}/v1/") as engine:
        assert engine.url == server.url
        assert (await engine.chat(ask())).text == "x"
        assert (await engine.model_info()).model == "scripted"


async def test_nobody_listening_is_unavailable(make: Callable[[str], Engine], free_port: int) -> None:
    async with make(f"http://127.0.0.1:{free_port}") as engine:
        with pytest.raises(EngineUnavailable, match=f"no engine answers at http://127.0.0.1:{free_port}"):
            await engine.chat(ask())
        assert not await engine.is_available()
        assert await engine.abort("fb-") is None


@pytest.mark.parametrize("status", [502, 503])
async def test_gateway_statuses_are_unavailable(make: Callable[[str], Engine], status: int) -> None:
    async with ScriptedEngine(lambda _: Reply(error_status=status)) as server, make(server.url) as engine:
        with pytest.raises(EngineUnavailable) as caught:
            await engine.chat(ask())
    assert caught.value.status_code == status


@pytest.mark.parametrize("status", [400, 404, 429, 500])
async def test_other_statuses_are_the_calls_own_error(make: Callable[[str], Engine], status: int) -> None:
    script = lambda _: Reply(error_status=status, text="context is too long")  # noqa: E731 - one reply
    async with ScriptedEngine(script) as server, make(server.url) as engine:
        with pytest.raises(EngineError, match="context is too long") as caught:
            await engine.chat(ask())
        assert len(server.calls) == 1
    assert not isinstance(caught.value, EngineUnavailable)
    assert caught.value.status_code == status


async def test_timeout_is_a_timeout_and_the_server_is_let_go(make: Callable[[str], Engine]) -> None:
    async with ScriptedEngine(lambda _: Reply(hang=True)) as server, make(server.url) as engine:
        with pytest.raises(TimeoutError):
            await engine.chat(ask(timeout_s=0.3))
        await server.wait_in_flight(0)


async def test_cancelling_a_chat_lets_the_server_go(make: Callable[[str], Engine]) -> None:
    async with ScriptedEngine(lambda _: Reply(hang=True)) as server, make(server.url) as engine:
        chat = asyncio.create_task(engine.chat(ask()))
        await server.wait_in_flight(1)
        chat.cancel()
        await server.wait_in_flight(0)


async def test_wait_available_returns_when_the_server_comes_back(make: Callable[[str], Engine]) -> None:
    async with ScriptedEngine(lambda _: "back") as server, make(server.url) as engine:
        server.available = False
        with pytest.raises(EngineUnavailable):
            await engine.chat(ask())
        waits = [asyncio.create_task(engine.wait_available(10)) for _ in range(20)]
        with pytest.raises(EngineUnavailable, match="took requests within"):
            await engine.wait_available(0.3)
        assert not any(wait.done() for wait in waits)
        server.available = True
        await asyncio.gather(*waits)
        assert (await engine.chat(ask())).text == "back"


async def test_chat_before_entering_says_what_to_do() -> None:
    for engine in (OpenAIEngine("http://127.0.0.1:1"), SGLangEngine("http://127.0.0.1:1")):
        with pytest.raises(RuntimeError, match="async with"):
            await engine.chat(ask())


@pytest.mark.parametrize("url", ["", "localhost:30000", "ftp://host", "http://"])
def test_an_address_that_is_none_is_refused(make: Callable[[str], Engine], url: str) -> None:
    with pytest.raises(InvalidInput):
        make(url)


@pytest.mark.parametrize("kind", ABORTING)
async def test_abort_by_prefix_stops_those_calls_only(kind: str) -> None:
    script = lambda _: Reply(text="so far", hang=True)  # noqa: E731 - one reply
    async with ScriptedEngine(script) as server, KINDS[kind](server.url) as engine:
        ours = [asyncio.create_task(engine.chat(ask(rid=f"fb-a-{slot}"))) for slot in range(3)]
        other = asyncio.create_task(engine.chat(ask(rid="fb-b-0")))
        await server.wait_in_flight(4)
        assert await engine.load() == EngineLoad(running=4, waiting=0)
        assert await engine.abort("fb-a-", timeout_s=0.5) == 1
        replies = await asyncio.gather(*ours)
        assert {(reply.text, reply.aborted) for reply in replies} == {("so far", True)}
        assert sorted(reply.rid or "" for reply in replies) == ["fb-a-0", "fb-a-1", "fb-a-2"]
        assert not other.done()
        assert await engine.abort_all() == 1
        assert (await other).aborted


@pytest.mark.parametrize("kind", ABORTING)
async def test_abandoned_call_is_aborted_by_its_rid(kind: str) -> None:
    async with ScriptedEngine(lambda call: "found" if call.number == 0 else Reply(hang=True)) as server:
        async with KINDS[kind](server.url) as engine:
            await engine.chat(ask())  # what kind of engine it is takes time to find out
            with pytest.raises(TimeoutError):
                await engine.chat(ask(rid="fb-late", timeout_s=1.0))
        assert server.aborts == ["fb-late"]


@pytest.mark.parametrize("kind", ABORTING)
async def test_empty_abort_prefix_is_refused(kind: str) -> None:
    async with ScriptedEngine(lambda _: "") as server, KINDS[kind](server.url) as engine:
        with pytest.raises(InvalidInput, match="every call"):
            await engine.abort("")


async def test_plain_openai_sends_no_rid_and_aborts_nothing() -> None:
    async with ScriptedEngine(lambda _: "x") as server, OpenAIEngine(server.url) as engine:
        await engine.chat(ask(rid="fb-1"))
        assert "rid" not in server.calls[0].body
        assert await engine.abort("fb-") is None
        assert await engine.abort_all() is None
        assert await engine.load() is None


async def test_reply_that_is_no_completion_is_an_engine_error(serve_json: Any) -> None:
    async with serve_json({"/v1/chat/completions": {"choices": []}}) as url, OpenAIEngine(url, model="m") as engine:
        with pytest.raises(EngineError, match="no chat completion"):
            await engine.chat(ask())


async def test_model_is_default_where_none_is_listed(serve_json: Any) -> None:
    async with serve_json({"/v1/models": {"object": "list", "data": []}}) as url, OpenAIEngine(url) as engine:
        assert (await engine.model_info()).model == "default"
    async with serve_json({}) as url, OpenAIEngine(url) as engine:
        assert (await engine.model_info()).model == "default"
        assert await engine.is_available()
