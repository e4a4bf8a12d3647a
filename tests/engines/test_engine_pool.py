"""Several engines as one: balance, rest after a failure, waiting, and finding out what answers."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

from forebay.core.clock import ManualClock
from forebay.core.errors import EngineError, EngineUnavailable, InvalidInput
from forebay.engines.abc import ChatRequest, EngineLoad
from forebay.engines.balance import Member, ask_in_turn, least_loaded
from forebay.engines.connect import connect
from forebay.engines.detect import DetectedEngine
from forebay.engines.openai import OpenAIEngine
from forebay.engines.pool import EnginePool
from forebay.engines.scripted import Reply, ScriptedEngine
from forebay.engines.sglang import SGLangEngine


def ask(**other: Any) -> ChatRequest:
    return ChatRequest(messages=[{"role": "user", "content": "hi"}], **{"timeout_s": 10.0, **other})


async def test_calls_go_to_the_engine_with_the_fewest_in_flight() -> None:
    async with AsyncExitStack() as stack:
        hanging = [ScriptedEngine(lambda _: Reply(hang=True)) for _ in range(3)]
        servers = [await stack.enter_async_context(engine) for engine in hanging]
        pool = await stack.enter_async_context(EnginePool([server.url for server in servers]))
        chats = [asyncio.create_task(pool.chat(ask(rid=f"fb-{slot}"))) for slot in range(6)]
        await asyncio.gather(*(server.wait_in_flight(2) for server in servers))
        assert pool.in_flight == {server.url: 2 for server in servers}
        assert await pool.load() == EngineLoad(running=6)
        assert await pool.abort("fb-", timeout_s=5) == 3
        assert all(reply.aborted for reply in await asyncio.gather(*chats))


async def test_another_engine_is_asked_when_one_refuses(free_port: int) -> None:
    server = ScriptedEngine(lambda _: "here")
    async with server, EnginePool([f"http://127.0.0.1:{free_port}", server.url]) as pool:
        assert [(await pool.chat(ask())).text for _ in range(4)] == ["here"] * 4
        assert await pool.load() == EngineLoad()
        assert await pool.abort("fb-", timeout_s=1) == 1


async def test_engine_that_said_503_is_left_alone_while_it_rests() -> None:
    clock = ManualClock()
    one, two = ScriptedEngine(lambda _: "one"), ScriptedEngine(lambda _: "two")
    async with one, two, EnginePool([one.url, two.url], clock=clock) as pool:
        assert {(await pool.chat(ask())).text for _ in range(2)} == {"one", "two"}
        one.available = False
        assert {(await pool.chat(ask())).text for _ in range(2)} == {"two"}
        one.available = True
        assert {(await pool.chat(ask())).text for _ in range(4)} == {"two"}
        clock.advance(1.0)
        assert {(await pool.chat(ask())).text for _ in range(2)} == {"one", "two"}


async def test_own_error_of_a_call_is_not_tried_elsewhere() -> None:
    script = lambda _: Reply(error_status=400, text="too long")  # noqa: E731 - one reply
    async with ScriptedEngine(script) as one, ScriptedEngine(script) as two, EnginePool([one.url, two.url]) as pool:
        with pytest.raises(EngineError, match="too long"):
            await pool.chat(ask())
        assert len(one.calls) + len(two.calls) == 1


async def test_pool_starts_before_its_engines_and_waits_for_the_first(free_port: int) -> None:
    server = ScriptedEngine(lambda _: "late", port=free_port)
    async with EnginePool([f"http://127.0.0.1:{free_port}"]) as pool:
        with pytest.raises(EngineUnavailable):
            await pool.chat(ask())
        with pytest.raises(EngineUnavailable):
            await pool.load()
        wait = asyncio.create_task(pool.wait_available())
        async with server:
            await asyncio.wait_for(wait, 10)
            assert (await pool.chat(ask())).text == "late"


async def test_many_waiters_share_one_probe_at_a_time(serve_counting: Any) -> None:
    async with serve_counting(503) as (counter, url), EnginePool([url]) as pool:
        waits = [pool.wait_available(0.5) for _ in range(50)]
        results = await asyncio.gather(*waits, return_exceptions=True)
        assert all(isinstance(result, EngineUnavailable) for result in results)
        assert counter["most_at_once"] == 1


@pytest.mark.parametrize("urls", [[], "http://127.0.0.1:1"])
def test_pool_wants_a_list_of_addresses(urls: Any) -> None:
    with pytest.raises(InvalidInput):
        EnginePool(urls)


def test_connect_takes_one_address_several_or_a_text_with_commas() -> None:
    one, two = "http://127.0.0.1:1", "http://127.0.0.1:2"
    assert list(connect(f"{one}/v1").in_flight) == [one]
    assert list(connect([one, two, one]).in_flight) == [one, two]
    assert list(connect(f"{one}, {two},").in_flight) == [one, two]
    with pytest.raises(InvalidInput):
        connect("")


@pytest.mark.parametrize(
    ("bodies", "kind"),
    [
        ({"/model_info": {"model_path": "m"}}, SGLangEngine),
        ({"/get_model_info": {"model_path": "m"}}, SGLangEngine),
        ({"/workers": {"workers": []}}, SGLangEngine),
        ({"/v1/models": {"data": []}}, OpenAIEngine),
        ({}, OpenAIEngine),
    ],
)
async def test_kind_of_engine_is_found_out(bodies: dict[str, Any], kind: type, serve_json: Any) -> None:
    async with serve_json(bodies) as url, DetectedEngine(url) as engine:
        assert type(await engine.found()) is kind
        assert await engine.found() is await engine.found()


async def test_starting_server_is_not_taken_for_a_plain_one() -> None:
    async with ScriptedEngine(lambda _: "") as server, DetectedEngine(server.url) as engine:
        server.available = False
        with pytest.raises(EngineUnavailable):
            await engine.found()
        server.available = True
        assert type(await engine.found()) is SGLangEngine


def test_rest_doubles_up_to_its_cap_and_one_burst_counts_once() -> None:
    clock = ManualClock()
    member = Member("a", clock)
    rests_s = []
    for _ in range(9):
        member.failed()
        member.failed()
        began_s = clock.monotonic()
        while member.resting:
            clock.advance(0.25)
        rests_s.append(clock.monotonic() - began_s)
    assert rests_s == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    member.failed()
    member.recovered()
    assert (member.resting, member.failures) == (False, 0)


def test_next_is_awake_then_least_loaded_then_not_asked_for_longest() -> None:
    clock = ManualClock()
    resting, busy, used, fresh = (Member(name, clock) for name in ("resting", "busy", "used", "fresh"))
    resting.failed()
    busy.in_flight, used.last_asked_ns = 1, 5
    order = []
    left = [resting, busy, used, fresh]
    while left:
        order.append(least_loaded(left).server)
        left.remove(least_loaded(left))
    assert order == ["fresh", "used", "busy", "resting"]


async def test_nobody_to_ask_is_unavailable() -> None:
    async def use(server: str) -> str:
        return server

    with pytest.raises(EngineUnavailable, match="no engine to ask"):
        await ask_in_turn([], use)
