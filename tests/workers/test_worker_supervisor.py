"""The workers of a run that cannot be started: one without a place is waited for, one that fails ends the run."""

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from forebay.engines.scripted import Reply, ScriptedCall, ScriptedEngine
from forebay.generators.base import BaseGenerator, single_turn
from forebay.generators.job.composition import Composition, compose_here
from forebay.workers.backends.abc import RunningWorker
from forebay.workers.members.worker_errors import PlacementFailed, WorkerError
from forebay.workers.rollouts import supervisor
from forebay.workers.rollouts.lead import RunWorkers
from forebay.workers.rollouts.orders import JobOrder, JobState
from forebay.workers.rollouts.run_worker import RunWorker
from forebay.workers.rollouts.supervisor import WorkerSupervisor
from tests.generators.conftest import buffer, write_rows
from tests.kit import poll_until
from tests.workers.workers_kit import starter

__all__ = ["buffer", "write_rows"]

LIMIT_S = 60


async def reward(item: dict[str, Any]) -> float:
    return 1.0


def run_with(start: Any, engine: ScriptedEngine, url: str, rows: Path) -> "asyncio.Task[Any]":
    """The job of a lead whose workers ``start`` starts."""

    async def run() -> Any:
        compose_here(Composition(places=RunWorkers(start, 2)))
        async with asyncio.timeout(LIMIT_S):
            return await BaseGenerator(engine.url, url).run_async(rows, single_turn, reward)

    return asyncio.create_task(run())


def own_start(engine: ScriptedEngine, url: str, rows: Path) -> Any:
    def call() -> None:
        asyncio.run(BaseGenerator(engine.url, url).run_async(rows, single_turn, reward))

    return starter(call, 2, [])


async def test_a_run_waits_for_a_place_and_its_deadlines_stand_still(buffer, write_rows, monkeypatch) -> None:
    monkeypatch.setattr(supervisor, "PLACE_AGAIN_S", 0.2)
    buffer.plan |= {"group_deadline_seconds": 4.0}
    has_room = False
    rows = write_rows({"instance_id": "a", "prompt": "a"})
    async with ScriptedEngine(lambda _: "x") as engine:
        inner = own_start(engine, buffer.url, rows)

        def start(number: int) -> RunningWorker:
            if not has_room:
                raise PlacementFailed("2 on one machine need CPU 2; free: host: CPU 1")
            return inner(number)

        running = run_with(start, engine, buffer.url, rows)
        await buffer.wait_for(lambda: states(buffer) == ["unplaced", "unplaced"], LIMIT_S)
        assert "need CPU 2; free: host: CPU 1" in json.dumps(buffer.progress[-1]["workers"])
        done, _ = await asyncio.wait({running}, timeout=4.5)
        assert not done
        has_room = True
        totals = await running
    assert (totals.num_completed, totals.num_groups_closed) == (2, 0)


async def test_workers_that_never_come_up_end_the_run(buffer, write_rows) -> None:
    def start(number: int) -> RunningWorker:
        raise OSError(f"no processes left for {number}")

    async with ScriptedEngine(lambda _: "x") as engine:
        rows = write_rows({"instance_id": "a", "prompt": "a"})
        with pytest.raises(WorkerError, match="no processes left"):
            await run_with(start, engine, buffer.url, rows)


async def test_workers_whose_code_fails_end_the_run_with_its_traceback(buffer, write_rows) -> None:
    def call() -> None:
        raise LookupError("no such dataset here")

    async with ScriptedEngine(lambda _: "x") as engine:
        rows = write_rows({"instance_id": "a", "prompt": "a"})
        with pytest.raises(WorkerError, match="no such dataset here"):
            await run_with(starter(call, 2, []), engine, buffer.url, rows)


async def test_what_a_lost_worker_asked_for_is_aborted_and_not_what_follows(buffer, write_rows) -> None:
    rows, lost = write_rows({"prompt": "a"}, {"prompt": "b"}), asyncio.Event()

    async def script(call: ScriptedCall) -> Reply:
        return Reply(text="x", hang=not lost.is_set())

    async with ScriptedEngine(script) as engine:
        inner, workers = own_start(engine, buffer.url, rows), dict[int, RunningWorker]()

        def start(number: int) -> RunningWorker:
            workers[number] = inner(number)
            return workers[number]

        running = run_with(start, engine, buffer.url, rows)
        await engine.wait_in_flight(4)
        await buffer.wait_for(lambda: sum(in_flight(buffer)) == 4, LIMIT_S)
        num_lost = max(in_flight(buffer))
        busy = in_flight(buffer).index(num_lost)
        lost.set()
        workers[busy].kill()
        await buffer.wait_for(lambda: engine.aborts and len(buffer.samples) >= num_lost, LIMIT_S)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    rids = [call.rid or "" for call in engine.calls]
    first, again = ([rid for rid in rids if f"-{attempt:02x}-" in rid] for attempt in (0, 1))
    assert again
    assert any(rid.startswith(tuple(engine.aborts)) for rid in first)
    assert not [rid for rid in again if rid.startswith(tuple(engine.aborts))]


async def test_the_first_worker_to_be_ready_leaves_the_others_their_share(buffer, write_rows) -> None:
    rows, may_start, is_over = write_rows(*({"prompt": "q"} for _ in range(10))), threading.Event(), asyncio.Event()
    num_places = 10

    async def script(call: ScriptedCall) -> Reply:
        await is_over.wait()
        return Reply(text="x")

    async with ScriptedEngine(script) as engine:
        inner = own_start(engine, buffer.url, rows)

        def start(number: int) -> RunningWorker:
            if number:
                may_start.wait(LIMIT_S)
            return inner(number)

        running = run_with(start, engine, buffer.url, rows)
        await engine.wait_in_flight(num_places // 2)
        may_start.set()
        await engine.wait_in_flight(num_places)
        await buffer.wait_for(lambda: sum(in_flight(buffer)) == num_places, LIMIT_S)
        assert in_flight(buffer) == [num_places // 2] * 2
        is_over.set()
        assert (await running).num_completed == 20


async def test_a_worker_that_comes_later_passes_the_jobs_before(buffer, write_rows) -> None:
    rows = write_rows(*({"prompt": "q"} for _ in range(4)))
    async with ScriptedEngine(lambda _: "x") as engine:

        async def job() -> Any:
            async with asyncio.timeout(LIMIT_S):
                return await BaseGenerator(engine.url, buffer.url).run_async(rows, single_turn, reward)

        async def jobs() -> list[int]:
            return [(await job()).num_completed for _ in range(4)]

        def call() -> None:
            passed.append(asyncio.run(jobs()))

        async def lead() -> None:
            places = RunWorkers(starter(call, 2, started), 2)
            compose_here(Composition(places=places))
            for number in range(4):
                assert (await job()).num_completed == 8
                if number in (1, 2):
                    started[-1].kill()
            await asyncio.to_thread(places.close, LIMIT_S)

        passed: list[list[int]] = []
        started: list[RunningWorker] = []
        await asyncio.create_task(lead())
    assert len(started) == 4
    assert [8, 8, 8, 8] in passed
    assert len(passed) >= 2


async def test_a_worker_that_comes_up_after_its_job_is_ended_again() -> None:
    may_start, started = threading.Event(), list[RunningWorker]()
    inner = starter(threading.Event().wait, 1, started)

    def start(number: int) -> RunningWorker:
        may_start.wait(LIMIT_S)
        return inner(number)

    job: Any = MagicMock()
    job.order_for.return_value = JobOrder(0, "r", 1, 1.0, 1.0, False, 1, 1, [], JobState(False, False, 0, True, None))
    workers = WorkerSupervisor(start, 1)
    workers.attach(job)
    await asyncio.sleep(0)
    await workers.detach()
    may_start.set()
    await asyncio.to_thread(poll_until, lambda: len(started) == 1, LIMIT_S)
    workers.attach(job)
    await asyncio.to_thread(poll_until, lambda: len(started) == 2, LIMIT_S)
    ended: list[str] = []
    for each in started:
        each.on_lost(ended.append)
    assert ended == ["it was killed"]
    await workers.detach()
    workers.close(0.0)


def test_a_worker_that_has_died_after_the_jobs_is_not_waited_for() -> None:
    running = starter(threading.Event().wait, 1, [])(0)
    worker = RunWorker(0)
    worker.begin(running)
    running.kill()
    began_s = time.monotonic()
    worker.close(LIMIT_S)
    assert time.monotonic() - began_s < LIMIT_S / 2


def states(buffer: Any) -> list[str]:
    """Of the workers, as the buffer heard of them last."""
    return [worker["state"] for worker in buffer.progress[-1].get("workers") or ()] if buffer.progress else []


def in_flight(buffer: Any) -> list[int]:
    """In each of them, as the buffer heard of it last."""
    told = [progress["workers"] for progress in buffer.progress if progress.get("workers")]
    return [worker["num_in_flight"] for worker in told[-1]] if told else []
