"""Runs whose workers are on a Ray cluster of this machine."""

import asyncio
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.engines.scripted import Reply, ScriptedCall, ScriptedEngine, ThreadedEngine
from tests.conftest import MakeServer
from tests.e2e.payloads import make_payload, numbered_rows
from tests.kit import Json, ServerProcess, poll_until
from tests.ray_kit import join_cluster
from tests.workers.attempts_kit import summaries_of
from tests.workers.test_run_workers import GROUP_SIZE, TASKS, log_of, wait_end, wait_ready

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def server(module_servers: MakeServer, tmp_path_factory: pytest.TempPathFactory) -> ServerProcess:
    import ray

    join_cluster()
    tasks = Path(shutil.copytree(TASKS, tmp_path_factory.mktemp("tasks") / "tasks"))
    address = ray.get_runtime_context().gcs_address
    return module_servers(generators=tasks, start_wait_s=60, ray_address=address, public_url="")


@pytest.fixture
def gate() -> threading.Event:
    """Closed; the engine answers nothing before it is open."""
    return threading.Event()


@pytest.fixture
def engine(gate: threading.Event) -> Iterator[ThreadedEngine]:
    async def script(call: ScriptedCall) -> Reply:
        while not gate.is_set():  # noqa: ASYNC110 - another thread opens it
            await asyncio.sleep(0.005)
        return Reply(text="ab"[call.number % 2] * 3, delay_s=0.1)

    with ScriptedEngine(script).in_thread() as engine:
        yield engine


def payload_of(folder: Path, engine: ThreadedEngine, task: str, num_rows: int, **changes: object) -> Json:
    numbers = {"num_repeat_per_sample": str(GROUP_SIZE), "task_type": task, "workers": 2, "backend": "ray"}
    return make_payload(folder, engine.url, numbered_rows(num_rows), **{**numbers, **changes})


def test_a_run_on_ray_fills_every_slot_once(server, engine, gate, tmp_path) -> None:
    run = server.start_run(group_size=GROUP_SIZE, **payload_of(tmp_path, engine, "counted", 6))
    # Ray brings lines of workers to the log while the run lives.
    poll_until(lambda: sum("before False" in line for line in log_of(run)) == 2)
    gate.set()
    view = wait_end(run)
    assert (view["samples"]["member"], view["samples"].get("duplicate", 0)) == (6 * GROUP_SIZE, 0)
    summaries = summaries_of(server, run)
    assert len(summaries) == 6 * GROUP_SIZE
    assert all("worker" in each for each in summaries)
    assert sum("before False" in line for line in log_of(run)) == 2


def test_a_killed_actor_costs_no_rollout(server, engine, gate, tmp_path) -> None:
    import psutil

    run = server.start_run(
        group_size=GROUP_SIZE, **payload_of(tmp_path, engine, "counted", 40, num_process=4, max_attempts=1)
    )
    wait_ready(run)
    pids = poll_until(
        lambda: [int(line.split(" in ")[1].split()[0]) for line in log_of(run) if "before False in" in line]
    )
    psutil.Process(pids[0]).kill()
    gate.set()
    view = wait_end(run)
    assert (view["samples"]["member"], view["samples"].get("failed", 0)) == (40 * GROUP_SIZE, 0)


def test_more_workers_than_there_is_room_for_are_waited_for(server, engine, tmp_path) -> None:
    run = server.start_run(group_size=GROUP_SIZE, **payload_of(tmp_path, engine, "counted", 2, workers=[40]))
    found = poll_until(lambda: [each for each in run.view()["workers"] if each["state"] == "unplaced"], timeout_s=90)
    assert "CPU 40" in found[0]["reason"]
    assert run.stop()["state"] == "stopped"
    assert "SIGTERM" in "\n".join(log_of(run))


def test_a_cluster_that_does_not_answer_ends_the_run_and_no_server_loads_ray(make_server, engine, tmp_path) -> None:
    tasks = Path(shutil.copytree(TASKS, tmp_path / "tasks"))
    server = make_server(generators=tasks, start_wait_s=60, ray_address="127.0.0.1:9", max_restarts=0)
    run = server.start_run(group_size=GROUP_SIZE, **payload_of(tmp_path, engine, "counted", 1))
    reason = run.wait_for_state("failed")["reason"]
    assert "no Ray cluster answers at 127.0.0.1:9" in reason
    assert "hint: " in reason
    assert "_raylet" not in Path(f"/proc/{server.pid}/maps").read_text()
