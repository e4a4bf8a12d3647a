"""The server pauses a run's engines, gives them other weights, and sees to it that they go on."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from forebay.engines.scripted import Reply, ScriptedEngine
from tests.conftest import MakeServer
from tests.kit import Json, ServerProcess, assert_error, poll_until
from tests.server.worker_kit import Worker, router_before

PAUSE, CONTINUE, UPDATE = "/pause_generation", "/continue_generation", "/update_weights_from_disk"
SLOW = Reply(text="x" * 40_000, tokens_per_s=500)


@pytest.fixture
async def http(server: ServerProcess) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, timeout=30) as http:
        yield http


async def start_run(http: httpx.AsyncClient, *urls: str) -> str:
    """A run with these engines into which nobody writes; its path."""
    body = {"task_type": "idle", "group_size": 1, "remote_engine_url": list(urls)}
    return f"/v1/runs/{(await http.post('/v1/runs', json=body)).json()['run_id']}"


async def update(http: httpx.AsyncClient, run: str, **body: Any) -> httpx.Response:
    return await http.put(f"{run}/weight_version", json={"weight_version": 7, "model_path": "/new", **body})


def chat(http: httpx.AsyncClient, engine: ScriptedEngine, **body: Any) -> asyncio.Task[httpx.Response]:
    """A call in flight at the engine."""
    asked = {"model": "m", "messages": [{"role": "user", "content": "a"}], "return_token_ids": True, **body}
    return asyncio.create_task(http.post(f"{engine.url}/v1/chat/completions", json=asked))


def versions(reply: httpx.Response) -> list[str]:
    return [span["version"] for span in reply.json()["metadata"]["weight_versions"]]


async def test_abort_ends_calls_before_the_weights_change(http: httpx.AsyncClient) -> None:
    async with ScriptedEngine(lambda _: SLOW) as engine:
        run = await start_run(http, f"{engine.url}/v1")
        call = chat(http, engine)
        await engine.wait_in_flight(1)
        told = (await update(http, run)).json()
        assert (told["weight_version"], told["mode"], told["workers"]) == (7, "abort", [engine.url])
        reply = await call
        assert reply.json()["choices"][0]["finish_reason"] == "abort"
        assert versions(reply) == ["default"]
        assert (engine.weight_version, engine.paused) == ("7", None)
        assert (await http.get(run)).json()["weight_version"] == 7


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_other_modes_keep_calls_which_go_on_with_the_new_weights(http: httpx.AsyncClient, mode: str) -> None:
    async with ScriptedEngine(lambda _: Reply(text="x" * 300, tokens_per_s=30)) as engine:
        run = await start_run(http, engine.url)
        call = chat(http, engine)
        await engine.wait_in_flight(1)
        assert (await update(http, run, mode=mode)).status_code == 200
        reply = await call
        assert versions(reply)[-1] == "7"
        assert len(reply.json()["choices"][0]["response_token_ids"]) == 301
        assert [body["flush_cache"] for body in engine.weight_updates] == [mode == "retract"]


async def test_behind_a_router_each_worker_is_told(http: httpx.AsyncClient) -> None:
    async with Worker().serving() as one, Worker().serving() as two, router_before(one.url, two.url) as router:
        run = await start_run(http, router)
        told = (await update(http, run, mode="abort")).json()
        assert sorted(told["workers"]) == sorted([one.url, two.url])
        for worker in (one, two):
            assert worker.told == [PAUSE, UPDATE, CONTINUE]
        engines = (await http.get(f"{run}/engines")).json()
    assert sorted(worker["url"] for worker in engines["workers"]) == sorted([one.url, two.url])
    assert engines["pause"] is None


async def test_a_worker_that_refuses_is_named_and_all_go_on(http: httpx.AsyncClient) -> None:
    async with Worker().serving() as good, Worker().serving() as bad:
        bad.refusal = "no such folder"
        run = await start_run(http, good.url, bad.url)
        error = assert_error(await update(http, run), 409, "weight_update_failed")
        assert f"on {bad.url}" in error["message"]
        assert "no such folder" in error["message"]
        assert (good.told[-1], bad.told[-1]) == (CONTINUE, CONTINUE)
        assert (await http.get(run)).json()["weight_version"] is None


async def test_a_worker_that_does_not_answer_is_told_to_go_on_until_it_does(http: httpx.AsyncClient) -> None:
    async with Worker().serving() as worker:
        run = await start_run(http, worker.url)
        worker.is_silent = True
        updating = asyncio.create_task(update(http, run))
        await worker.wait_told(CONTINUE, 3)
        worker.is_silent = False
        assert (await updating).status_code == 200
        await worker.wait_told(CONTINUE, 4)


async def test_an_engine_that_is_gone_is_told_before_any_is_paused(http: httpx.AsyncClient) -> None:
    async with Worker().serving() as there, Worker().serving() as gone:
        pass
    async with Worker().serving() as there:
        run = await start_run(http, there.url, gone.url)
        assert_error(await update(http, run), 503, "engine_unavailable")
        assert there.told == []


async def test_a_trainer_that_brings_weights_itself_pauses_and_continues(http: httpx.AsyncClient) -> None:
    async with ScriptedEngine(lambda _: "x") as engine:
        run = await start_run(http, engine.url)
        told = (await http.post(f"{run}/engines/pause", json={"mode": "retract", "limit_s": 60})).json()
        assert told == {"mode": "retract", "limit_s": 60, "workers": [engine.url]}
        assert engine.paused == "retract"
        assert (await http.get(f"{run}/engines")).json()["pause"]["mode"] == "retract"
        call = chat(http, engine)
        await engine.wait_calls(1)
        told = (await http.post(f"{run}/engines/continue", json={"weight_version": 3})).json()
        assert told == {"weight_version": 3, "was_paused": True}
        assert versions(await call) == ["3"]
        assert (await http.get(run)).json()["weight_version"] == 3
        again = await http.post(f"{run}/engines/continue", json={"weight_version": 3})
        assert again.json()["was_paused"] is False


async def test_engines_that_are_held_are_not_paused_by_anybody_else(http: httpx.AsyncClient) -> None:
    async with Worker().serving() as worker:
        run, other = await start_run(http, worker.url), await start_run(http, worker.url)
        for _ in range(2):  # a lost reply, and the same again
            assert (await http.post(f"{run}/engines/pause", json={"mode": "abort"})).status_code == 200
        for refused in (
            await update(http, other),
            await update(http, run),
            await http.post(f"{run}/engines/pause", json={"mode": "retract"}),
            await http.post(f"{other}/engines/pause"),
        ):
            assert run.rpartition("/")[2] in assert_error(refused, 409, "engines_paused")["message"]
        assert worker.told.count(CONTINUE) == 0
        assert (await http.post(f"{run}/engines/continue")).json()["was_paused"] is True
        assert (await update(http, other)).status_code == 200


async def test_a_pause_ends_by_itself_and_the_trainer_hears_of_it(http: httpx.AsyncClient) -> None:
    async with Worker().serving() as worker:
        run = await start_run(http, worker.url)
        await http.post(f"{run}/engines/pause", json={"limit_s": 0.1})
        await worker.wait_told(CONTINUE)
        answer = await http.post(f"{run}/engines/continue", json={"weight_version": 3})
        assert_error(answer, 409, "pause_expired")
        assert (await http.get(run)).json()["weight_version"] is None
        assert (await http.post(f"{run}/engines/continue")).json()["was_paused"] is False


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("weight_version", {"weight_version": 1, "mode": "abort"}, "body"),
        ("weight_version", {"weight_version": 1, "mode": "now", "model_path": "/new"}, "mode"),
        ("weight_version", {"weight_version": 1, "model_path": ""}, "model_path"),
        ("weight_version", {"weight_version": -1}, "weight_version"),
        ("weight_version", {"weight_version": 1, "model_path": "/new"}, "remote_engine_url"),
        ("engines/pause", {"mode": "abort"}, "remote_engine_url"),
        ("engines/pause", {"limit_s": 0}, "limit_s"),
        ("engines/pause", {"limit": 1}, "limit"),
        ("engines/continue", {"weight_version": "x"}, "weight_version"),
    ],
)
async def test_what_cannot_be_done_is_refused(http: httpx.AsyncClient, path: str, body: Json, field: str) -> None:
    run = await start_run(http)
    method = "PUT" if path == "weight_version" else "POST"
    assert_error(await http.request(method, f"{run}/{path}", json=body), 422, "invalid_input", field)
    unknown = await http.request(method, f"/v1/runs/run-none/{path}", json={"weight_version": 1})
    assert unknown.status_code in (404, 422)


async def test_an_engine_that_is_no_sglang_is_refused(http: httpx.AsyncClient) -> None:
    async with router_before() as nobody:  # it has /workers, and none
        run = await start_run(http, f"{nobody}/other")
        assert_error(await update(http, run), 422, "invalid_input", "mode")


@pytest.mark.soak
async def test_a_server_killed_in_the_middle_of_an_update_lets_engines_go_on_when_it_is_back(
    make_server: MakeServer,
) -> None:
    server = await asyncio.to_thread(make_server)
    async with Worker().serving() as worker, httpx.AsyncClient(base_url=server.url, timeout=30) as http:
        worker.loads.clear()
        run = await start_run(http, worker.url)
        updating = asyncio.create_task(update(http, run))
        await worker.wait_told(UPDATE)
        server.kill9()
        assert isinstance((await asyncio.gather(updating, return_exceptions=True))[0], httpx.TransportError)
        assert CONTINUE not in worker.told
        await asyncio.to_thread(server.restart)
        await worker.wait_told(CONTINUE)
        worker.loads.set()
        await asyncio.to_thread(poll_until, lambda: not list((server.data_dir / "pauses").glob("*.json")))


@pytest.mark.soak
async def test_a_pause_outlives_the_server_and_its_time_limit_as_well(make_server: MakeServer) -> None:
    server = await asyncio.to_thread(make_server)
    async with Worker().serving() as worker, Worker().serving() as other:
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as http:
            run, short = await start_run(http, worker.url), await start_run(http, other.url)
            await http.post(f"{run}/engines/pause", json={"limit_s": 60})
            await http.post(f"{short}/engines/pause", json={"limit_s": 0.5})
        server.kill9()
        await asyncio.to_thread(server.restart)
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as http:
            await other.wait_told(CONTINUE)
            assert CONTINUE not in worker.told
            told = (await http.post(f"{run}/engines/continue", json={"weight_version": 2})).json()
            assert (told["was_paused"], worker.told[-1]) == (True, CONTINUE)
            assert_error(await http.post(f"{short}/engines/continue"), 409, "pause_expired")
