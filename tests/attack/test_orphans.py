"""Single processes below the server are killed: what they had started ends too, and the rest goes on."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from tests.conftest import MakeServer
from tests.kit import TIME_LIMIT_S, NativeRun, ServerProcess, children_with, make_group, poll_until, write_generator

FORKS = """
import json, os, signal, subprocess, sys, threading
from pathlib import Path

def fork_children(who):
    '''Some that ignore every polite signal: a plain one, one in a group of its own, and a program that it starts.'''
    told = Path({told!r}) / f"{{who}}-{{os.getpid()}}"
    pids = []
    for is_apart in (False, True):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            if is_apart:
                os.setpgid(0, 0)
            grandchild = subprocess.Popen(["sleep", "600"])
            os.write(writer, str(grandchild.pid).encode())
            threading.Event().wait()
        pids += [pid, int(os.read(reader, 100))]
    told.with_suffix(".tmp").write_text(json.dumps([os.getpid(), *pids]))
    told.with_suffix(".tmp").replace(told)
"""
RUNS = (
    FORKS
    + """
TASK_TYPE = "forks"

def is_valid_group(group, min_valid_group_size, task_type):
    if os.environ.get("FORKED") is None:
        os.environ["FORKED"] = "1"
        fork_children("hook")
    return True, True

def run_rollout(data):
    fork_children("run")
    print(data["remote_buffer_url"])
    threading.Event().wait()
"""
)
HANGS_AT_IMPORT = (
    FORKS
    + """
TASK_TYPE = "hangs"
fork_children("inspection")
threading.Event().wait()
"""
)


def told(folder: Path, who: str) -> list[int]:
    """The process ``who`` (of several, the last one that told) and what it had forked."""
    found = poll_until(lambda: [path for path in folder.glob(f"{who}-*") if path.suffix != ".tmp"])
    pids: list[int] = json.loads(max(found, key=lambda path: path.stat().st_mtime_ns).read_text())
    assert len(pids) == 5
    return pids


def is_gone(pid: int) -> bool:
    """Ended, and waited for."""
    return not psutil.pid_exists(pid)


def check_gone(pids: list[int]) -> None:
    poll_until(lambda: all(is_gone(pid) for pid in pids))


@pytest.fixture
def forking(make_server: MakeServer, tmp_path: Path) -> ServerProcess:
    tasks = tmp_path / "tasks"
    write_generator(tasks, RUNS.format(told=str(tmp_path)), "forks_generator.py")
    return make_server(generators=tasks, start_wait_s=60)


def check_usable(run: NativeRun, name: str) -> None:
    """It takes samples and hands them out."""
    run.write(*make_group(name, [0, 1]))
    assert {row["instance_id"] for row in run.take(num_groups=1, wait_s=20)["data"]} == {name}


def restarted(run: NativeRun, tmp_path: Path, before: list[int]) -> list[int]:
    """The run's next process, and what it has forked in its turn."""
    return poll_until(lambda: pids if (pids := told(tmp_path, "run")) != before else [])


@pytest.mark.parametrize("victim", ["monitor", "main"])
def test_a_killed_run_leaves_nothing_and_is_started_again(forking: ServerProcess, tmp_path: Path, victim: str) -> None:
    run = forking.start_run("forks", group_size=2)
    pids = told(tmp_path, "run")
    main = psutil.Process(pids[0])
    killed = main.parent() if victim == "monitor" else main
    assert killed is not None
    assert ("forebay.generators.process.monitor" in killed.cmdline()) == (victim == "monitor")
    killed.kill()
    check_gone([*pids, killed.pid])
    next_pids = restarted(run, tmp_path, pids)
    check_usable(run, "after")
    run.stop()
    check_gone(next_pids)


def test_a_killed_hook_host_leaves_nothing_and_the_next_read_has_another(
    forking: ServerProcess, tmp_path: Path
) -> None:
    run = forking.start_run("forks", group_size=2)
    check_usable(run, "before")
    pids = told(tmp_path, "hook")
    os.kill(pids[0], signal.SIGKILL)
    check_gone(pids)
    check_usable(run, "after")
    assert told(tmp_path, "hook")[0] != pids[0]


def test_a_killed_inspection_leaves_nothing_and_is_told(forking: ServerProcess, tmp_path: Path) -> None:
    write_generator(forking.generators, HANGS_AT_IMPORT.format(told=str(tmp_path)), "hangs_generator.py")
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(forking.client.get, "/v1/generators")  # it waits for the inspection
        pids = told(tmp_path, "inspection")
        os.kill(pids[0], signal.SIGKILL)
        check_gone(pids)
    (inspected,) = [each for each in asked.result().json()["generators"] if each["path"].endswith("hangs_generator.py")]
    assert inspected["status"] == "failed"
    assert "importing it ended the process (Killed)" in inspected["error"]


def test_a_killed_gateway_is_followed_by_another(forking: ServerProcess, tmp_path: Path) -> None:
    run = forking.start_run("forks", group_size=2, remote_engine_url="http://127.0.0.1:9")
    link = poll_until(lambda: next((line for line in run_log(run) if "/w/" in line), ""))
    assert httpx.post(f"{link}/gateway", timeout=TIME_LIMIT_S).is_success
    (killed,) = gateways(forking)
    os.kill(killed, signal.SIGKILL)
    check_gone([killed])
    poll_until(lambda: gateways(forking) not in ([], [killed]))
    assert httpx.post(f"{link}/gateway", timeout=TIME_LIMIT_S).is_success
    check_usable(run, "after")


def run_log(run: NativeRun) -> list[str]:
    lines: list[str] = run.client.get(f"{run.path}/log").json()["lines"]
    return lines


def gateways(server: ServerProcess) -> list[int]:
    return [child.pid for child in children_with(server.pid, "forebay.gateway")]


def test_a_killed_server_leaves_nothing(forking: ServerProcess, tmp_path: Path) -> None:
    run = forking.start_run("forks", group_size=2)
    check_usable(run, "before")
    pids = [*told(tmp_path, "run"), *told(tmp_path, "hook")[:1]]
    forking.kill9()
    poll_until(lambda: not any(is_running(pid) for pid in pids))


def is_running(pid: int) -> bool:
    """Zombies are those of whoever is the parent now."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


SHORT_LIVED = """
import os, threading, time
from pathlib import Path
TASK_TYPE = "daemons"
def run_rollout(data):
    for _ in range(20):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                while not Path(data["gate"]).exists():
                    time.sleep(0.02)
            os._exit(0)
        os.wait()
    threading.Event().wait()
"""


def test_what_ended_is_waited_for_in_whatever_session_it_was(make_server: MakeServer, tmp_path: Path) -> None:
    write_generator(tmp_path / "tasks", SHORT_LIVED, "daemons_generator.py")
    server = make_server(generators=tmp_path / "tasks", start_wait_s=60)
    gate = tmp_path / "gate"
    run = server.start_run("daemons", group_size=2, gate=str(gate))
    poll_until(lambda: len(psutil.Process(server.pid).children()) > 10)
    gate.touch()
    poll_until(lambda: len(psutil.Process(server.pid).children()) == 1)  # the monitor
    check_usable(run, "after")


LEAVES_A_PROGRAM = """
import subprocess
from pathlib import Path
TASK_TYPE = "leaves"
def run_rollout(data):
    program = subprocess.Popen(["sleep", "600"], start_new_session=True)
    Path(data["told_to"]).write_text(str(program.pid))
"""


def test_a_program_in_a_session_of_its_own_outlives_its_run_and_the_server(
    make_server: MakeServer, tmp_path: Path
) -> None:
    write_generator(tmp_path / "tasks", LEAVES_A_PROGRAM, "leaves_generator.py")
    server = make_server(generators=tmp_path / "tasks", start_wait_s=60)
    path = tmp_path / "told"
    server.start_run("leaves", group_size=2, told_to=str(path)).wait_for_state("finished")
    program = psutil.Process(int(path.read_text()))
    try:
        assert program.ppid() == server.pid
        assert server.stop() == 0
        assert is_running(program.pid)
    finally:
        program.kill()
