"""What every engine client promises, shown for each kind over a real socket."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from forebay.core.errors import EngineError, EngineUnavailable, InvalidInput
from forebay.engines.abc import Engine, EngineLoad
from forebay.engines.detect import DetectedEngine
from forebay.engines.openai import OpenAIEngine
from forebay.engines.scripted import Reply, ScriptedEngine
from forebay.engines.sglang import SGLangEngine
from tests.kit import TIME_LIMIT_S

KINDS: dict[str, Callable[[str], Engine]] = {
    "openai": OpenAIEngine,
    "sglang": SGLangEngine,
    "detected": DetectedEngine,
}
ABORTING = sorted(KINDS.keys() - {"openai"})


@pytest.fixture(params=sorted(KINDS))
def make(request: pytest.FixtureRequest) -> Callable[[str], Engine]:
    return KINDS[request.param]


async def test_address_with_v1_is_the_same_address(make: Callable[[str], Engine]) -> None:
    async with ScriptedEngine(lambda _: "x") as server, make(f"{server.url}/v1/") as engine:
        assert engine.url == server.url
        assert (await engine.model_info()).model == "scripted"


async def test_nobody_listening_is_unavailable(make: Callable[[str], Engine], free_port: int) -> None:
    async with make(f"http://127.0.0.1:{free_port}") as engine:
        with pytest.raises(EngineUnavailable, match=f"no engine answers at http://127.0.0.1:{free_port}"):
            await engine.model_info()
        assert not await engine.is_available()
        assert await engine.abort("fb-") is None


@pytest.mark.parametrize("status", [502, 503])
async def test_gateway_statuses_are_unavailable(make: Callable[[str], Engine], status: int, serve_status: Any) -> None:
    async with serve_status(status) as url, make(url) as engine:
        with pytest.raises(EngineUnavailable) as caught:
            await engine.model_info()
        assert not await engine.is_available()
    assert caught.value.status_code == status


@pytest.mark.parametrize("status", [400, 429, 500])
async def test_other_statuses_are_errors_of_an_engine_that_is_there(
    make: Callable[[str], Engine], status: int, serve_status: Any
) -> None:
    async with serve_status(status) as url, make(url) as engine:
        with pytest.raises(EngineError) as caught:
            await engine.model_info()
    assert not isinstance(caught.value, EngineUnavailable)
    assert caught.value.status_code == status


async def test_wait_available_returns_when_the_server_comes_back(make: Callable[[str], Engine]) -> None:
    async with ScriptedEngine(lambda _: "back") as server, make(server.url) as engine:
        server.available = False
        with pytest.raises(EngineUnavailable):
            await engine.model_info()
        waits = [asyncio.create_task(engine.wait_available(30)) for _ in range(20)]
        with pytest.raises(EngineUnavailable, match="accepted requests within"):
            await engine.wait_available(0.3)
        assert not any(wait.done() for wait in waits)
        server.available = True
        await asyncio.gather(*waits)
        assert (await engine.model_info()).model == "scripted"


async def test_use_before_entering_says_what_to_do() -> None:
    for engine in (OpenAIEngine("http://127.0.0.1:1"), SGLangEngine("http://127.0.0.1:1")):
        with pytest.raises(RuntimeError, match="async with"):
            await engine.model_info()


@pytest.mark.parametrize("url", ["", "localhost:30000", "ftp://host", "http://"])
def test_an_address_that_is_none_is_refused(make: Callable[[str], Engine], url: str) -> None:
    with pytest.raises(InvalidInput):
        make(url)


@pytest.mark.parametrize("kind", ABORTING)
async def test_abort_by_prefix_stops_those_calls_only(kind: str) -> None:
    script = lambda _: Reply(text="so far", hang=True)  # noqa: E731 - one reply
    async with (
        ScriptedEngine(script) as server,
        KINDS[kind](server.url) as engine,
        httpx.AsyncClient(timeout=TIME_LIMIT_S) as http,
    ):

        async def chat(rid: str) -> dict[str, Any]:
            body = {"messages": [{"role": "user", "content": "hi"}], "rid": rid}
            reply = await http.post(f"{server.url}/v1/chat/completions", json=body)
            choice: dict[str, Any] = reply.json()["choices"][0]
            return choice

        ours = [asyncio.create_task(chat(f"fb-a-{slot}")) for slot in range(3)]
        other = asyncio.create_task(chat("fb-b-0"))
        await server.wait_in_flight(4)
        assert await engine.load() == EngineLoad(running=4, waiting=0)
        assert await engine.abort("fb-a-", timeout_s=5) == 1
        choices = await asyncio.gather(*ours)
        assert {(choice["message"]["content"], choice["finish_reason"]) for choice in choices} == {("so far", "abort")}
        assert not other.done()
        assert await engine.abort_all() == 1
        assert (await other)["finish_reason"] == "abort"


@pytest.mark.parametrize("kind", ABORTING)
async def test_empty_abort_prefix_is_refused(kind: str) -> None:
    async with ScriptedEngine(lambda _: "") as server, KINDS[kind](server.url) as engine:
        with pytest.raises(InvalidInput, match="every call"):
            await engine.abort("")


async def test_plain_openai_aborts_nothing() -> None:
    async with ScriptedEngine(lambda _: "x") as server, OpenAIEngine(server.url) as engine:
        assert await engine.abort("fb-") is None
        assert await engine.abort_all() is None
        assert await engine.load() is None


async def test_model_is_default_where_none_is_listed(serve_json: Any) -> None:
    async with serve_json({"/v1/models": {"object": "list", "data": []}}) as url, OpenAIEngine(url) as engine:
        assert (await engine.model_info()).model == "default"
    async with serve_json({}) as url, OpenAIEngine(url) as engine:
        assert (await engine.model_info()).model == "default"
        assert await engine.is_available()
