"""Runs over two Ray nodes with addresses of their own, a token, and a disk that only the first one has."""

import asyncio
import shutil
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from forebay.engines.scripted import Reply, ScriptedCall, ScriptedEngine, ThreadedEngine
from tests.cluster_kit import TwoNodes, other_forebay
from tests.e2e.payloads import make_payload, numbered_rows
from tests.e2e.reading import run_process_of
from tests.kit import Json, NativeRun, ServerProcess, poll_until
from tests.workers.attempts_kit import restarts, summaries_of
from tests.workers.test_run_workers import TASKS, log_of

pytestmark = pytest.mark.cluster

GROUP_SIZE, WORKERS = 2, [1, 1]
HEAD_ALONE = "10.99.0.1"
"""An address of the first node that the second one has no way to."""


class HeadServer(ServerProcess):
    """On the first node."""

    host = ""

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


class Head:
    """The first node, on which the tests of this file run, with an engine."""

    def __init__(self, nodes: TwoNodes, stack: ExitStack) -> None:
        self.nodes, self._stack = nodes, stack
        self.tasks = Path(shutil.copytree(TASKS, nodes.head_only / "tasks"))
        self.gate = threading.Event()
        """Open; while it is closed, the engine answers nothing."""
        self.gate.set()
        self.engine: ThreadedEngine = stack.enter_context(ScriptedEngine(self._answer, host=nodes.ips[0]).in_thread())
        subprocess.run(["ip", "address", "add", f"{HEAD_ALONE}/32", "dev", "lo"], check=True)
        self.server = self._make_server("server")
        self.strict = self._make_server("strict", gateway_host=HEAD_ALONE, max_restarts=0)

    async def _answer(self, call: ScriptedCall) -> Reply:
        while not self.gate.is_set():  # noqa: ASYNC110 - another thread opens it
            await asyncio.sleep(0.005)
        return Reply(text="ab"[call.number % 2] * 3, delay_s=0.3)

    def _make_server(self, name: str, **settings: Any) -> ServerProcess:
        address = {"host": self.nodes.ips[0], "ray_address": self.nodes.address, "insecure": "true"}
        folder = self.nodes.head_only / name
        HeadServer.host = self.nodes.ips[0]
        server = HeadServer(
            folder, generators=self.tasks, env=self.nodes.environ(), start_wait_s=60, **{**address, **settings}
        )
        self._stack.callback(server.close)
        return server.start()

    def start(self, task: str, num_rows: int, server: ServerProcess | None = None, **changes: Any) -> NativeRun:
        body = {"task_type": task, "num_repeat_per_sample": str(GROUP_SIZE), "workers": WORKERS, "backend": "ray"}
        payload = make_payload(self.nodes.head_only, self.engine.url, numbered_rows(num_rows), **{**body, **changes})
        return (server or self.server).start_run(group_size=GROUP_SIZE, **payload)

    def workers(self) -> list[psutil.Process]:
        """The actors of runs, on both nodes."""
        found = []
        for pid in self.nodes.pids(0) + self.nodes.pids(1):
            try:
                process = psutil.Process(pid)
                if "ForebayWorker" in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    with TwoNodes(cpus=(4, 4)) as nodes, nodes.entered(0), ExitStack() as stack:
        yield Head(nodes, stack)


def wait_end(run: NativeRun, state: str = "finished") -> Json:
    view = poll_until(lambda: (view := run.view())["state"] not in ("validating", "running") and view, 120)
    assert view["state"] == state, view["reason"]
    return view


def wait_ready(run: NativeRun) -> list[Json]:
    """The workers, once each of them takes rollouts."""
    return poll_until(
        lambda: (found := run.view()["workers"]) and all(each["state"] == "ready" for each in found) and found, 60
    )


def check_exact(run: NativeRun, num_rows: int) -> None:
    """Every slot is filled once, every group whole, no sample twice."""
    wait_end(run)
    assert [group["num_samples"] for group in run.groups()] == [GROUP_SIZE] * num_rows
    rows = run.take(num_groups=num_rows, wait_s=20)["data"]
    assert len({row["uid"] for row in rows}) == len(rows) == num_rows * GROUP_SIZE
    assert set(Counter((row["instance_id"], row["slot"]) for row in rows).values()) == {1}
    assert set(Counter(row["instance_id"] for row in rows).values()) == {GROUP_SIZE}


def test_a_node_without_the_runs_folder_takes_part_in_log_and_trace(head) -> None:
    head.gate.clear()
    run = head.start("counted", 16, num_process=6, workers=[1, 2])
    listed = wait_ready(run)
    head.gate.set()
    by_node = Counter(each["node"] for each in listed)
    assert sorted(by_node) == head.nodes.ips
    assert sorted(by_node.values()) == [1, 2]
    wait_end(run)
    summaries = summaries_of(head.server, run)
    assert len(summaries) == 16 * GROUP_SIZE
    assert {each["worker"] for each in summaries} == {0, 1, 2}
    assert all(sum(each["phases"].values()) == each["d"] and each["phases"]["engine"] > 0 for each in summaries)
    told = [line for line in log_of(run) if "before False" in line]
    second = head.nodes.ips[1]
    assert (len(told), sum(f"ip={second}" in line for line in told)) == (3, by_node[second])
    assert not any("\x1b" in line for line in log_of(run))


def test_a_killed_lead_and_a_killed_server_leave_no_process_on_any_node(head) -> None:
    run = head.start("agents", 60, num_process=4)
    for number, kill in enumerate((lambda: run_process_of(head.server).kill(), head.server.kill9), 1):
        poll_until(lambda: len(head.workers()) == sum(WORKERS), 60)
        wait_ready(run)
        poll_until(lambda number=number: run.view()["samples"].get("member", 0) >= 4 * number, 60)
        below = head.workers()
        kill()
        _, left = psutil.wait_procs(below, timeout=60)
        assert left == []
    assert not head.workers()
    head.server.restart()
    check_exact(run, 60)


def test_what_one_node_cannot_reach_is_said_with_its_field(head) -> None:
    reason = wait_end(head.start("agents", 2, head.strict), "failed")["reason"]
    assert f"the workers on {head.nodes.ips[1]} cannot reach the gateway at http://{HEAD_ALONE}:" in reason
    assert "field: gateway_url" in reason
    assert "hint: " in reason
    local = head.start("counted", 2, head.strict, remote_engine_url="http://127.0.0.1:30000")
    reason = wait_end(local, "failed")["reason"]
    assert "workers on other machines cannot reach the engine at http://127.0.0.1:30000" in reason
    assert "field: remote_engine_url" in reason


def test_a_node_that_dies_costs_no_sample_and_its_rollouts_begin_elsewhere(head) -> None:
    head.gate.clear()
    run = head.start("agents", 40, num_process=8, max_attempts=1)
    wait_ready(run)
    head.gate.set()
    poll_until(lambda: run.view()["samples"].get("member", 0) >= 8, 60)
    killed_ns = time.time_ns()
    head.nodes.kill(1)
    check_exact(run, 40)
    waits = list(restarts(summaries_of(head.server, run), killed_ns))
    print("from kill to restart elsewhere, s:", [round(wait, 1) for wait in sorted(waits)])
    assert waits
    assert max(waits) <= 30


def test_a_node_with_another_forebay_is_refused_with_both_versions(head, tmp_path) -> None:
    head.nodes.start(1, PYTHONPATH=other_forebay(tmp_path))
    reason = wait_end(head.start("counted", 2, head.strict), "failed")["reason"]
    assert f"node {head.nodes.ips[1]} has Forebay 0.0.9 (here " in reason
    assert "field: backend" in reason
