"""The SGLang client behind a router, and what it sends to whom."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from forebay.core.errors import EngineUnavailable
from forebay.engines.abc import EngineLoad
from forebay.engines.scripted import Reply, ScriptedEngine
from forebay.engines.sglang import SGLangEngine


async def chat(url: str, rid: str) -> str:
    """The finish reason of one chat sent to ``url``."""
    async with httpx.AsyncClient(timeout=30) as http:
        body = {"messages": [{"role": "user", "content": "hi"}], "rid": rid}
        reply = await http.post(f"{url}/v1/chat/completions", json=body)
    return str(reply.json()["choices"][0]["finish_reason"])


@pytest.fixture
async def workers() -> Any:
    async with AsyncExitStack() as stack:
        engines = [ScriptedEngine(lambda _: Reply(hang=True)), ScriptedEngine(lambda _: Reply(hang=True))]
        yield [await stack.enter_async_context(engine) for engine in engines]


def urls(workers: list[ScriptedEngine]) -> list[str]:
    return [worker.url for worker in workers]


async def test_load_and_aborts_go_to_every_worker(workers: list[ScriptedEngine], serve_router: Any) -> None:
    async with serve_router(urls(workers)) as (router, url), SGLangEngine(url) as engine:
        assert await engine.workers() == urls(workers)
        chats = [asyncio.create_task(chat(worker.url, f"fb-{slot}")) for slot in range(2) for worker in workers]
        await asyncio.gather(*(worker.wait_in_flight(2) for worker in workers))
        assert await engine.load() == EngineLoad(running=4)
        assert await engine.abort("fb-", timeout_s=60) == 2
        assert await asyncio.gather(*chats) == ["abort"] * 4
        assert (router.chats, router.listings) == (0, 1)


async def test_unhealthy_worker_gets_no_chats(workers: list[ScriptedEngine], serve_router: Any) -> None:
    async with serve_router(urls(workers)) as (router, url), SGLangEngine(url) as engine:
        router.workers[0]["is_healthy"] = False
        assert await engine.workers() == [workers[1].url]


async def test_model_is_that_of_a_worker_that_answers(serve_router: Any, free_port: int) -> None:
    alive = ScriptedEngine(lambda _: "alive", model="alive")
    dead_url = f"http://127.0.0.1:{free_port}"
    async with alive, serve_router([dead_url, alive.url]) as (_, url), SGLangEngine(url) as engine:
        assert (await engine.model_info()).model == "alive"
        assert await engine.is_available()


async def test_worker_added_later_is_used(serve_router: Any) -> None:
    first, second = ScriptedEngine(lambda _: "first"), ScriptedEngine(lambda _: "second")
    async with first, second, serve_router([first.url]) as (router, url), SGLangEngine(url) as engine:
        assert await engine.workers() == [first.url]
        router.workers = [router.listed(second.url)]
        assert await engine.is_available()
        assert await engine.workers() == [second.url]


async def test_list_that_cannot_be_read_again_leaves_the_last_one_in_use(serve_router: Any) -> None:
    async with ScriptedEngine(lambda _: "still here") as worker:
        async with serve_router([worker.url]) as (_, url):
            engine = await SGLangEngine(url).__aenter__()
            assert await engine.workers() == [worker.url]
        async with engine:
            assert await engine.is_available()
            assert await engine.workers() == [worker.url]


async def test_router_without_workers_for_chats_is_asked_itself(serve_router: Any) -> None:
    async with ScriptedEngine(lambda _: "through the router") as worker:
        async with serve_router([worker.url]) as (router, url), SGLangEngine(url, model="scripted") as engine:
            router.workers[0]["worker_type"] = "prefill"
            assert await engine.workers() == [url]
            assert engine.is_through_router
            assert await engine.abort("fb-1", timeout_s=30) == 1
        assert worker.aborts[0] == "fb-1"


async def test_router_that_is_gone_is_unavailable(free_port: int) -> None:
    async with SGLangEngine(f"http://127.0.0.1:{free_port}") as engine:
        with pytest.raises(EngineUnavailable):
            await engine.workers()
        with pytest.raises(EngineUnavailable):
            await engine.load()
        assert await engine.abort_all() is None


async def test_data_parallel_ranks_of_a_worker_are_one_address(serve_router: Any) -> None:
    ranks = ["http://127.0.0.1:1@0", "http://127.0.0.1:1@1"]
    async with serve_router(ranks) as (_, url), SGLangEngine(url) as engine:
        assert await engine.workers() == ["http://127.0.0.1:1"]


async def test_weight_version_is_told() -> None:
    async with ScriptedEngine(lambda _: "x", model="tiny") as server, SGLangEngine(server.url) as engine:
        info = await engine.model_info()
    assert (info.model, info.model_path, info.weight_version) == ("tiny", "tiny", "default")
