"""SIGTERM while something hangs: the server ends in time, with status 0, and nothing acknowledged is lost."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.attack.start_code import python_path_with
from tests.conftest import MakeServer
from tests.kit import TIME_LIMIT_S, ServerProcess, make_group, poll_until, write_generator

STUBBORN = """
import signal, threading
TASK_TYPE = "stubborn"
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
def run_rollout(data):
    while True:
        threading.Event().wait(1)
"""
STUCK_INSPECTION = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(1_000)
TASK_TYPE = "stuck"
"""
STUCK_HOOK = """
import threading
TASK_TYPE = "stuck_hook"
def run_rollout(data):
    threading.Event().wait()
def is_valid_group(group_data, min_valid_group_size, task_type):
    threading.Event().wait()
"""
USES_ALL = """
import threading
from pathlib import Path
TASK_TYPE = "uses_all"
def run_rollout(data):
    Path(data["told_to"] + ".partial").write_text(data["remote_buffer_url"])
    Path(data["told_to"] + ".partial").rename(data["told_to"])
    threading.Event().wait()
def is_valid_group(group_data, min_valid_group_size, task_type):
    return True, True
"""
STUCK_THREAD = """
import threading
from concurrent.futures import ThreadPoolExecutor
submit = ThreadPoolExecutor.submit
def stuck(self, function, *args, **kwargs):
    submit(self, threading.Event().wait)
    ThreadPoolExecutor.submit = submit
    return submit(self, function, *args, **kwargs)
ThreadPoolExecutor.submit = stuck
"""


def descendants(pid: int) -> list[int]:
    """All processes below ``pid``."""
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    own = [int(word) for word in listed.stdout.split()]
    return own + [each for child in own for each in descendants(child)]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def ends_in_time(server: ServerProcess) -> None:
    below = descendants(server.pid)
    assert server.stop() == 0  # waits for `TIME_LIMIT_S`, and what hangs would for ever
    poll_until(lambda: not any(map(is_running, below)))


def stop_processes(server: ServerProcess) -> None:
    """Every process of the server's stands still: monitor, run process, gateway and hook host."""
    write_generator(server.generators, USES_ALL, "uses_all_generator.py")
    told_to = server.directory / "told"
    engine_url = "http://127.0.0.1:9"
    run = server.start_run("uses_all", group_size=2, remote_engine_url=engine_url, told_to=str(told_to))
    poll_until(told_to.exists)
    assert httpx.post(f"{told_to.read_text()}/gateway", timeout=TIME_LIMIT_S).is_success
    run.write(*make_group("judged", [0.1, 0.2]))
    assert run.take(num_groups=1, wait_s=20)["data"]
    below = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in descendants(server.pid)}
    for module in ("process.monitor", "workers.runtime", "forebay.gateway", "hooks.host"):
        assert any(module in command for command in below.values()), below
    for pid in below:
        os.kill(pid, signal.SIGSTOP)


def refuse_to_end(server: ServerProcess) -> None:
    write_generator(server.generators, STUBBORN, "stubborn_generator.py")
    server.start_run("stubborn").wait_for_state("running")


def hang_in_an_inspection(server: ServerProcess) -> None:
    write_generator(server.generators, STUCK_INSPECTION, "stuck_generator.py")
    started = server.client.post("/v1/runs", json={"task_type": "stuck", "group_size": 2})
    assert started.json()["state"] == "validating"


def hang_in_a_hook(server: ServerProcess) -> None:
    write_generator(server.generators, STUCK_HOOK, "stuck_hook_generator.py")
    run = server.start_run("stuck_hook", group_size=2)
    run.write(*make_group("judged", [0.1, 0.2]))
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{server.url}{run.path}/batches", json={"num_groups": 1}, timeout=httpx.Timeout(TIME_LIMIT_S, read=1)
        )


def never_read(server: ServerProcess) -> None:
    """A client that asks for a large batch and takes none of it, and one that begins a request and sends no more."""
    run = server.start_run(group_size=2)
    run.write(*make_group("large", [0.1, 0.2], pad="x" * (32 << 20)))
    for head in (f"POST {run.path}/batches", "POST /v1/runs"):
        connection = socket.create_connection(("127.0.0.1", server.port))
        body = b'{"num_groups": 1}' if "batches" in head else b"{"
        length = len(body) if "batches" in head else 1_000
        connection.sendall(f"{head} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n".encode() + body)
        OPEN.append(connection)


OPEN: list[socket.socket] = []


# Together they take no longer than each alone.
@pytest.mark.parametrize(
    "hangs",
    [[stop_processes], [refuse_to_end, hang_in_an_inspection, hang_in_a_hook, never_read]],
    ids=["what is stopped", "what is stuck"],
)
def test_the_server_ends_in_time(make_server: MakeServer, hangs: list[Callable[[ServerProcess], None]]) -> None:
    server = make_server(start_wait_s=1)
    kept = server.start_run(group_size=2)
    kept.write(*make_group("kept", [0.5, 1.0]))
    try:
        for hang in hangs:
            hang(server)
        ends_in_time(server)
    finally:
        while OPEN:
            OPEN.pop().close()
    server.restart()
    assert len(kept.take(num_groups=1)["data"]) == 2


def test_a_thread_that_never_ends_does_not_keep_the_server(make_server: MakeServer, tmp_path: Path) -> None:
    server = make_server(env=python_path_with(tmp_path, STUCK_THREAD), stop_limit_s=3)
    run = server.start_run(group_size=2)
    run.write(*make_group("kept", [0.5, 1.0]))
    run.stop()
    began_s = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - began_s > 2
    assert "has not ended within stop_limit_s (3 s)" in server.log()
