"""A user's code looks for the server's token: in its environment, in those of others, in the server's memory."""

import ctypes
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import httpx
import pytest

from tests.attack import secret_spy
from tests.conftest import MakeServer
from tests.kit import (
    TIME_LIMIT_S,
    Json,
    NativeRun,
    ServerProcess,
    children_with,
    make_group,
    poll_until,
    write_generator,
)

TOKEN = "t0ken-of-the-whole-server"
SPIES = """
import asyncio, sys, threading
from secret_spy import __file__ as spy, look
from forebay.generators.sandbox import Sandbox
TASK_TYPE = "spies"

def is_valid_group(group, min_valid_group_size, task_type):
    look("hook")
    return True, True

async def command():
    async with Sandbox() as sandbox:
        print((await sandbox.run([sys.executable, spy, "command"])).problem)

def run_rollout(data):
    look("run")
    print(data["remote_buffer_url"])
    asyncio.run(command())
    threading.Event().wait()

if "inspect_child" in str(getattr(sys.modules["__main__"], "__file__", "")):
    look("inspection")
"""
_PR_CAPBSET_DROP, _CAP_SYS_PTRACE = 24, 19
T = TypeVar("T")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no /proc")


def without_ptrace(start: Callable[[], T]) -> T:
    """``start`` processes that may not look into others by right of being root: as in any ordinary container."""

    def dropped() -> T:
        # Of this thread only, and of what it starts. Who is not root cannot drop it, and has none.
        ctypes.CDLL(None).prctl(_PR_CAPBSET_DROP, _CAP_SYS_PTRACE)
        return start()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(dropped).result()


@pytest.fixture
def spied(make_server: MakeServer, tmp_path: Path) -> ServerProcess:
    tasks = tmp_path / "tasks"
    write_generator(tasks, SPIES, "spies_generator.py")
    source = Path(secret_spy.__file__).read_text().replace("@FOLDER@", str(tmp_path)).replace("@NEKOT@", TOKEN[::-1])
    (tasks / "secret_spy.py").write_text(source)
    server = without_ptrace(lambda: make_server(generators=tasks, token=TOKEN, log_level="debug", start_wait_s=60))
    server.client.headers["authorization"] = f"Bearer {TOKEN}"
    return server


def told(tmp_path: Path, who: str) -> Json:
    path = tmp_path / f"{who}.json"
    poll_until(path.exists)
    answer: Json = json.loads(path.read_text())
    return answer


def test_no_process_with_a_users_code_finds_the_token(spied: ServerProcess, tmp_path: Path) -> None:
    run = spied.start_run("spies", group_size=2)
    run.write(*make_group("one", [0, 1]))
    run.take(num_groups=1, wait_s=20)
    for who in ("inspection", "run", "command", "hook"):
        spy = told(tmp_path, who)
        assert "serve" in spy["server"], "it looked at another process"
        assert spy["found"] == [], f"what {who} found"
    check_nothing_tells(spied, run)


def check_nothing_tells(server: ServerProcess, run: NativeRun) -> None:
    """Neither a log, at its most talkative, nor a view, nor a file."""
    pages = (
        "/v1/runs",
        run.path,
        f"{run.path}/log",
        f"{run.path}/groups",
        "/v1/generators",
        "/metrics",
        "/openapi.json",
    )
    for page in pages:
        answer = server.client.get(page)
        assert answer.is_success, page
        assert TOKEN not in answer.text, page
    assert server.client.get("/v1/runs", headers={"authorization": "Bearer wrong"}).status_code == 401
    assert TOKEN not in server.log(10_000_000)
    files = [path for path in server.data_dir.rglob("*") if path.is_file()]
    assert files
    assert [path for path in files if TOKEN.encode() in path.read_bytes()] == []


def test_nobody_opens_the_memory_or_the_files_of_server_and_gateway(spied: ServerProcess) -> None:
    run = spied.start_run("spies", group_size=2, remote_engine_url="http://127.0.0.1:9")
    link = poll_until(lambda: next((line for line in run_log(run) if "/w/" in line), ""))
    assert httpx.post(f"{link}/gateway", timeout=TIME_LIMIT_S).is_success, "a gateway is started"
    gateways = children_with(spied.pid, "forebay.gateway")
    assert len(gateways) == 1
    for pid in (spied.pid, gateways[0].pid):
        for look in (f"open('/proc/{pid}/mem')", f"os.readlink('/proc/{pid}/fd/0')"):
            command = [sys.executable, "-c", f"import os; {look}"]
            done = without_ptrace(partial(subprocess.run, command, capture_output=True, check=False))
            assert b"PermissionError" in done.stderr, (pid, look, done)


def run_log(run: NativeRun) -> list[str]:
    lines: list[str] = run.client.get(f"{run.path}/log").json()["lines"]
    return lines


@pytest.mark.parametrize("way", ["option", "option=", "variable"])
def test_a_command_hides_the_token_that_it_was_given(way: str) -> None:
    flags = {"option": ["--token", TOKEN], "option=": [f"--token={TOKEN}"], "variable": []}[way]
    environ = {**os.environ, **({"FOREBAY_TOKEN": TOKEN} if way == "variable" else {})}
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        command = [sys.executable, "-m", "forebay.server.cli", "status", "--url", url, *flags]
        with subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                silent.settimeout(TIME_LIMIT_S)
                connection, _ = silent.accept()
                with connection:
                    connection.settimeout(TIME_LIMIT_S)
                    assert TOKEN.encode() in connection.recv(65_536), "it is sent all the same"
                    for name in ("cmdline", "environ"):
                        assert TOKEN.encode() not in Path(f"/proc/{process.pid}/{name}").read_bytes(), name
            finally:
                process.kill()
