"""Deadlines stand still while a run's engines do, whoever writes its samples."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.conftest import MakeServer
from tests.kit import Json, NativeRun, ServerProcess, make_group
from tests.lent import lend_runs, lent_url
from tests.server.worker_kit import Worker

CONTINUE, UPDATE = "/continue_generation", "/update_weights_from_disk"
TIMEOUT_S = 0.5


class Paused:
    """A run with one engine, into which a test writes one of two samples."""

    def __init__(self, http: httpx.AsyncClient, run: NativeRun, worker: Worker) -> None:
        self.http = http
        self.run = run
        self.worker = worker

    async def post(self, path: str, **body: Any) -> None:
        answer = await self.http.post(f"{self.run.path}/{path}", json=body)
        assert answer.status_code == 200, answer.text

    def update(self) -> "asyncio.Task[httpx.Response]":
        body = {"weight_version": 7, "model_path": "/new"}
        return asyncio.create_task(self.http.put(f"{self.run.path}/weight_version", json=body))

    async def write_half(self) -> None:
        await self.post("samples", **make_group("short", [1.0])[0])

    async def half_updated(self) -> "asyncio.Task[httpx.Response]":
        """An update that its worker holds up, and half a group that was written meanwhile."""
        self.worker.loads.clear()
        updating = self.update()
        await self.worker.wait_told(UPDATE)
        await self.write_half()
        assert await self.is_paused()
        return updating

    async def closed(self, wait_s: float) -> list[str]:
        """The reasons of the groups that are closed within this time."""
        answer = await self.http.get(f"{self.run.path}/closed_groups", params={"wait_s": wait_s})
        return [group["reason"] for group in answer.json()["groups"]]

    async def is_paused(self) -> bool:
        view: Json = (await self.http.get(self.run.path)).json()
        assert isinstance(view["is_paused"], bool)
        return view["is_paused"]


@asynccontextmanager
async def pausable(server: ServerProcess) -> AsyncIterator[Paused]:
    async with Worker().serving() as worker, httpx.AsyncClient(base_url=server.url, timeout=30) as http:
        settings = {"group_size": 2, "group_timeout_seconds": TIMEOUT_S, "remote_engine_url": worker.url}
        run = await asyncio.to_thread(server.start_run, **settings)
        yield Paused(http, run, worker)
        await asyncio.to_thread(run.stop)


async def test_deadlines_stand_still_while_a_trainer_holds_the_engines(server: ServerProcess) -> None:
    async with pausable(server) as run:
        await run.post("engines/pause", mode="retract")
        await run.write_half()
        assert await run.is_paused()
        assert await run.closed(3 * TIMEOUT_S) == []
        await run.post("engines/continue")
        assert not await run.is_paused()
        assert await run.closed(20) == ["timed_out"]


async def test_deadlines_stand_still_while_weights_are_updated(server: ServerProcess) -> None:
    async with pausable(server) as run:
        updating = await run.half_updated()
        assert await run.closed(3 * TIMEOUT_S) == []
        run.worker.loads.set()
        assert (await updating).status_code == 200
        assert not await run.is_paused()
        assert await run.closed(20) == ["timed_out"]


async def test_they_count_again_when_a_pause_ends_by_itself_or_comes_to_nothing(server: ServerProcess) -> None:
    async with pausable(server) as run:
        await run.post("engines/pause", limit_s=0.1)
        await run.worker.wait_told(CONTINUE)
        run.worker.refusal = "no such folder"
        assert (await run.update()).status_code == 409
        assert not await run.is_paused()
        await run.write_half()
        assert await run.closed(20) == ["timed_out"]


async def test_a_pause_that_outlives_the_server_holds_the_deadlines_as_well(make_server: MakeServer) -> None:
    server = await asyncio.to_thread(make_server)
    async with pausable(server) as run:
        await run.post("engines/pause", limit_s=60)
        await run.write_half()
        server.kill9()
        await asyncio.to_thread(server.restart)
        run.http = httpx.AsyncClient(base_url=server.url, timeout=30)
        assert await run.is_paused()
        assert await run.closed(3 * TIMEOUT_S) == []
        await run.post("engines/continue")
        assert await run.closed(20) == ["timed_out"]
        await run.http.aclose()


async def test_an_update_that_the_server_did_not_outlive_leaves_no_run_paused(make_server: MakeServer) -> None:
    server = await asyncio.to_thread(make_server)
    async with pausable(server) as run:
        updating = await run.half_updated()
        server.kill9()
        await asyncio.gather(updating, return_exceptions=True)
        await asyncio.to_thread(server.restart)
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as run.http:
            assert await run.closed(20) == ["timed_out"]
            assert not await run.is_paused()
        run.worker.loads.set()


async def test_the_run_process_hears_of_it_at_once(server: ServerProcess, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "q"}\n')
    await asyncio.to_thread(lend_runs, server)
    async with Worker().serving() as worker, httpx.AsyncClient(timeout=30) as http:
        run = await asyncio.to_thread(server.start_run, "lent", input_file=str(rows), remote_engine_url=worker.url)
        feed = f"{await asyncio.to_thread(lent_url, server, run.run_id)}/closed_groups"
        told = (await http.get(feed, params={"seen": 0})).json()
        assert told["paused"] is False
        waiting = asyncio.create_task(http.get(feed, params={"seen": told["seen"], "wait_s": 25}))
        await http.post(f"{server.url}{run.path}/engines/pause", json={})
        assert (await waiting).json()["paused"] is True
        waiting = asyncio.create_task(http.get(feed, params={"seen": told["seen"], "paused": True, "wait_s": 25}))
        await http.post(f"{server.url}{run.path}/engines/continue", json={})
        assert (await waiting).json()["paused"] is False
        await asyncio.to_thread(run.stop)
