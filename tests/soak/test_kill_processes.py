"""``kill -9`` of one process below the server after the other, while samples are written and read."""

import os
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from tests.conftest import MakeServer
from tests.kit import TIME_LIMIT_S, NativeRun, ServerProcess, make_group, poll_until, write_generator
from tests.liveness import Liveness
from tests.soak.kill_load import GROUP_SIZE, KillLoad, Ledger
from tests.soak.test_kill_server import check_journal, check_receipts, check_samples

ROUNDS = int(os.environ.get("ROUNDS", "25"))
"""By hand, `make test-soak ROUNDS=200`."""
FORKING = """
import multiprocessing, threading
TASK_TYPE = "forking"
def run_rollout(data):
    print(data["remote_buffer_url"])
    multiprocessing.get_context("fork").Process(target=threading.Event().wait).start()
    threading.Event().wait()
"""
JUDGED = """
import threading
TASK_TYPE = "judged"
def is_valid_group(group, min_valid_group_size, task_type):
    return True, True
def run_rollout(data):
    threading.Event().wait()
"""
MODULES = {
    "monitor": "forebay.generators.process.monitor",
    "main": "forebay.workers.runtime",
    "gateway": "forebay.gateway",
    "hook host": "forebay.hooks.host",
    "inspection": "forebay.generators.discovery.inspect_child",
}


class Victims:
    """Kills what is alive of the processes below a server."""

    def __init__(self, server: ServerProcess, judged: NativeRun, seed: int) -> None:
        self.killed: Counter[str] = Counter()
        self._server = server
        self._judged = judged
        self._rng = random.Random(seed)
        self._number = 0
        self._next: list[str] = []

    def round(self) -> None:
        """Kill one that is there just now: of those that wait for their restart there is none."""
        # A hook host and an inspection are there when there is work for them, so they get some first.
        self._number += 1
        if not self._next:  # each in its turn, however few the rounds are
            self._next = self._rng.sample(list(MODULES), len(MODULES))
        kind = self._next.pop()
        if kind == "inspection":
            self._kill_inspection()
        elif kind == "hook host":
            self._judge()
            self._kill(kind)
            self._judge()
        else:
            self._kill(kind)

    def _kill(self, kind: str) -> None:
        for process in self._alive(kind)[:1]:
            process.kill()
            # A hook host that dies while it is asked costs its group, as documented.
            process.wait(TIME_LIMIT_S)
            self.killed[kind] += 1

    def _alive(self, kind: str) -> list[psutil.Process]:
        found = []
        for process in psutil.Process(self._server.pid).children(recursive=True):
            try:
                # A monitor is told what it is to start.
                if MODULES[kind] == next((word for word in process.cmdline() if word.startswith("forebay.")), ""):
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def _judge(self) -> None:
        self._number += 1
        self._judged.write(*make_group(f"judged-{self._number}", [0, 1]))
        self._judged.take(num_groups=1, wait_s=TIME_LIMIT_S)

    def _kill_inspection(self) -> None:
        source = f"import threading\nTASK_TYPE = 'slow{self._number}'\nthreading.Event().wait()\n"
        path = write_generator(self._server.generators, source, "slow_generator.py")
        with ThreadPoolExecutor(1) as thread:
            asked = thread.submit(httpx.get, f"{self._server.url}/v1/generators", timeout=TIME_LIMIT_S)
            # An edit meanwhile is looked at once more.
            poll_until(lambda: self._kill("inspection") or asked.done())
            assert asked.result().is_success
        path.unlink()


SMALL = {"segment_bytes": 1 << 16, "remembered_samples": 64}
"""Segments, and what memory keeps: so that both are exceeded in every round."""


def kill_rounds(make_server: MakeServer, tasks: Path, rounds: int) -> tuple[ServerProcess, NativeRun, Ledger]:
    """The server, stopped, with the run under load and the clients' account of it."""
    write_generator(tasks, FORKING, "forking_generator.py")
    write_generator(tasks, JUDGED, "judged_generator.py")
    server = make_server(generators=tasks, start_wait_s=60, max_restarts=10_000, **SMALL)
    run = server.start_run("forking", group_size=GROUP_SIZE, remote_engine_url="http://127.0.0.1:9")
    lines = poll_until(lambda: run.client.get(f"{run.path}/log").json()["lines"])
    httpx.post(f"{lines[0]}/gateway", timeout=TIME_LIMIT_S).raise_for_status()
    victims = Victims(server, server.start_run("judged", group_size=2), seed=rounds)
    load = KillLoad(server, run, num_writers=4, num_readers=1)
    try:
        with Liveness(server):
            while victims.killed.total() < rounds:
                load.wait_for_acknowledgements(5)
                victims.round()
            ledger = load.finish()
    except BaseException:
        load.abandon()
        raise
    assert set(victims.killed) == set(MODULES), victims.killed
    run.stop()
    below = psutil.Process(server.pid).children(recursive=True)
    assert server.stop() == 0
    poll_until(lambda: not any(process.is_running() for process in below))
    return server, run, ledger


@pytest.mark.soak
async def test_processes_killed_one_by_one_cost_no_sample(make_server: MakeServer, tmp_path: Path) -> None:
    server, run, ledger = kill_rounds(make_server, tmp_path / "tasks", ROUNDS)
    states = await check_samples(server.data_dir, run.run_id, ledger)
    check_receipts(ledger, states)
    assert check_journal(server.data_dir, run.run_id, states) > 1, "segments were rolled"
