"""Runs of the built-in tasks, in each of which a worker is killed at a random moment."""

import asyncio
import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator

import psutil
import pytest

from forebay.engines.scripted import Reply, ScriptedCall, ScriptedEngine, ThreadedEngine
from tests.conftest import MakeServer
from tests.e2e.payloads import make_payload
from tests.e2e.reading import run_process_of
from tests.kit import Json, NativeRun, ServerProcess, children_with, poll_until
from tests.workers.attempts_kit import restarts, summaries_of

pytestmark = pytest.mark.soak

ROUNDS = int(os.environ.get("ROUNDS", "10"))
"""By hand, `make test-soak ROUNDS=100`."""
LAST_ROW = "or 23?"
NUM_ROWS, GROUP_SIZE, NUM_WORKERS, NUM_PROCESS = 24, 4, 3, 24
RESTART_LIMIT_S = float(os.environ.get("RESTART_LIMIT_S", "30"))
"""From the kill of a worker until its rollouts have begun elsewhere, for 19 of 20 of them. By hand, on an idle
machine, RESTART_LIMIT_S=2."""
may_end = threading.Event()
"""A run is not over before: the answers to its last row are not given."""


async def answers(call: ScriptedCall) -> Reply:
    """Of ``tool`` a call first; the answers of a group differ."""
    while LAST_ROW in str(call.messages) and not may_end.is_set():  # noqa: ASYNC110 - another thread sets it
        await asyncio.sleep(0.01)
    is_tool = bool(call.body.get("tools")) and call.messages[-1]["role"] != "tool"
    if is_tool:
        function = {"name": "calculator", "arguments": json.dumps({"expression": "12 * 2"})}
        return Reply(tool_calls=[{"id": "c1", "type": "function", "function": function}], delay_s=0.3)
    return Reply(text=f"\\boxed{{{24 + call.number % 2}}}", delay_s=0.2 + 0.4 * (call.number % 5))


@pytest.fixture(scope="module")
def engine() -> Iterator[ThreadedEngine]:
    with ScriptedEngine(answers).in_thread() as engine:
        yield engine


@pytest.fixture(scope="module")
def server(module_servers: MakeServer) -> ServerProcess:
    return module_servers(start_wait_s=60)


waits: list[float] = []
"""Seconds until each lost rollout had begun elsewhere, over all rounds."""


@pytest.mark.parametrize("number", range(ROUNDS))
def test_a_worker_killed_at_a_random_moment_costs_nothing(server, engine, tmp_path, number) -> None:
    rng = random.Random(number)
    may_end.clear()
    task = ("math", "tool")[number % 2]
    rows = [{"instance_id": f"row-{n}", "prompt": f"12 * 2, or {n}?", "label": "24"} for n in range(NUM_ROWS)]
    payload = make_payload(tmp_path, engine.url, rows, task_type=task, num_process=NUM_PROCESS, max_tokens=64)
    payload |= {"num_repeat_per_sample": GROUP_SIZE, "workers": NUM_WORKERS, "max_attempts": 1}
    run = server.start_run(group_size=GROUP_SIZE, **payload)
    lead = run_process_of(server)
    threshold = rng.randrange(0, NUM_ROWS * GROUP_SIZE - NUM_PROCESS)
    poll_until(lambda: run.view()["samples"].get("member", 0) >= threshold and run.view()["workers"], 120)
    time.sleep(rng.random())
    killed_ns = time.time_ns()
    rng.choice(workers_of(lead)).kill()
    may_end.set()
    check_exact(run)
    waits.extend(restarts(summaries_of(server, run), killed_ns))


def test_lost_rollouts_begin_elsewhere_at_once() -> None:
    waits.sort()
    print("from kill to restart elsewhere, s:", [round(wait, 2) for wait in waits])
    assert len(waits) >= ROUNDS
    assert waits[int(0.95 * len(waits))] <= RESTART_LIMIT_S


def test_a_killed_lead_and_a_killed_server_leave_nobody_and_lose_nothing(make_server, engine, tmp_path) -> None:
    server = make_server(start_wait_s=60)
    may_end.clear()
    rows = [{"instance_id": f"row-{n}", "prompt": f"12 * 2, or {n}?", "label": "24"} for n in range(NUM_ROWS)]
    payload = make_payload(tmp_path, engine.url, rows, task_type="math", num_process=NUM_PROCESS, max_tokens=64)
    payload |= {"num_repeat_per_sample": GROUP_SIZE, "workers": NUM_WORKERS, "max_attempts": 1}
    run = server.start_run(group_size=GROUP_SIZE, **payload)
    for number, kill in enumerate((lambda: run_process_of(server).kill(), server.kill9), 1):
        poll_until(lambda number=number: run.view()["samples"].get("member", 0) >= 4 * number, 120)
        lead = run_process_of(server)
        poll_until(lambda lead=lead: len(workers_of(lead)) == NUM_WORKERS)
        below = [lead, *lead.children(recursive=True)]
        kill()
        _, left = psutil.wait_procs(below, timeout=60)
        assert left == []
    may_end.set()
    server.restart()
    check_exact(run, has_counts=False)


def workers_of(lead: psutil.Process) -> list[psutil.Process]:
    return children_with(lead.pid, "forebay.workers.backends.child")


def check_exact(run: NativeRun, *, has_counts: bool = True) -> None:
    """Every slot is filled once, every group whole, no sample twice."""
    view = poll_until(lambda: (view := run.view())["state"] not in ("validating", "running") and view, 180)
    assert view["state"] == "finished", view["reason"]
    if has_counts:  # of samples since the server started, and of rollouts by processes that could report them
        assert (view["samples"]["member"], view["samples"].get("failed", 0)) == (NUM_ROWS * GROUP_SIZE, 0)
        assert view["counts"]["rollouts_finished"] == NUM_ROWS * GROUP_SIZE
    groups: list[Json] = run.client.get(f"{run.path}/groups", params={"limit": 1_000}).json()["groups"]
    assert len(groups) == NUM_ROWS
    assert {group["num_samples"] for group in groups} == {GROUP_SIZE}
    slots, uids = Counter[tuple[str, int]](), Counter[str]()
    while (reply := run.client.post(f"{run.path}/batches", json={"num_groups": 1, "wait_s": 0.5})).status_code != 410:
        batch = reply.json()
        run.ack(batch)
        slots.update((row["instance_id"], row["slot"]) for row in batch["data"])
        uids.update(row["uid"] for row in batch["data"])
        sizes = Counter(row["instance_id"] for row in batch["data"])
        assert set(sizes.values()) == {GROUP_SIZE}
    assert {slot: number for slot, number in slots.items() if number > 1} == {}
    assert {uid: number for uid, number in uids.items() if number > 1} == {}
