"""What a generator finds in its run process: a real monitor and a real runtime around each."""

import json
import os
import signal
import socket
import subprocess
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
import pytest

from forebay.core.child_process import child_environment, python_argv
from forebay.core.processes.parent_link import HEADER_BYTES, frame
from forebay.generators.process.code_copy import copy_code
from forebay.generators.process.run_logs import log_path, read_tail
from forebay.generators.process.spec import Report, ReportPart, RunSpec

RUNTIME = "forebay.workers.runtime"
HEADER = """
import asyncio, json, multiprocessing, os, signal, subprocess, sys, threading, time
from pathlib import Path
TASK_TYPE = "t"
OUT = Path(__file__).parent.parent / "out.json"
class Item:
    def __init__(self, value): self.value = value
def double(item): return Item(item.value * 2)
def children():
    context = multiprocessing.get_context("fork")
    child = context.Process(target=time.sleep, args=(600,)); child.start()
    other = subprocess.Popen(["sleep", "600"])
    OUT.write_text(json.dumps([os.getpid(), child.pid, other.pid]))
"""


@dataclass
class Started:
    monitor: "subprocess.Popen[bytes]"
    server: socket.socket
    run_dir: Path

    def wait(self) -> Report:
        code = self.monitor.wait(timeout=60)
        self.server.shutdown(socket.SHUT_RD)  # what it has sent can still be read
        last = ReportPart()
        with self.server.makefile("rb") as stream:
            while header := stream.read(HEADER_BYTES):
                last = msgspec.msgpack.decode(stream.read(int.from_bytes(header, "big")), type=ReportPart)
        return Report(last.is_returned, last.error, last.traceback, code)

    def log(self) -> list[str]:
        return read_tail(log_path(self.run_dir), 100)

    def out(self):
        return json.loads((self.run_dir / "out.json").read_text())

    def until_out(self):
        """Wait for the generator to have written its file."""
        until(lambda: (self.run_dir / "out.json").exists() and (self.run_dir / "out.json").stat().st_size > 0)
        return self.out()


def until(condition) -> None:
    """Wait, at most 60 s, for something that other processes do and cannot announce."""
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s, "waited too long"
        time.sleep(0.005)


class Launcher:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.started: list[Started] = []

    def start(self, body: str, *, payload: dict[str, object] | None = None, log_limit_bytes: int = 2**20) -> Started:
        source = self.root / "tasks" / "my_task_generator.py"
        source.parent.mkdir(exist_ok=True)
        source.write_text(HEADER + textwrap.dedent(body))
        run_dir = self.root / "run"
        copy = copy_code(source, run_dir)
        ours, theirs = socket.socketpair()
        arguments = [RUNTIME, str(log_path(run_dir)), str(log_limit_bytes), str(theirs.fileno()), str(os.getpid())]
        argv = python_argv("forebay.generators.process.monitor", *arguments)
        with theirs:
            monitor = subprocess.Popen(argv, pass_fds=[theirs.fileno()], cwd=self.root, start_new_session=True)
        ours.sendall(frame(RunSpec(str(copy), str(source.parent), payload or {}).encode()))
        self.started.append(Started(monitor, ours, run_dir))
        return self.started[-1]


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    for started in launcher.started:
        started.server.close()
        started.monitor.wait(timeout=30)


def test_run_rollout_gets_the_payload_in_the_servers_working_directory(launcher: Launcher, tmp_path: Path) -> None:
    started = launcher.start(
        """
        def run_rollout(data):
            OUT.write_text(json.dumps([data, os.getcwd(), __name__, sys.argv[1:], sys.stdin.read()]))
        """,
        payload={"remote_buffer_url": "http://127.0.0.1:1/w/secret", "skip_instance_ids": [1, "1"] * 50_000},
    )
    assert started.wait() == Report(is_returned=True, error="", traceback="", exit_code=0)
    payload, cwd, name, argv, stdin = started.out()
    assert payload["skip_instance_ids"][:2] == [1, "1"]
    assert (cwd, name, stdin) == (str(tmp_path), "my_task_generator", "")
    assert "secret" not in " ".join(argv)


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_classes_of_the_module_pickle_under_every_start_method(launcher: Launcher, method: str) -> None:
    started = launcher.start(
        f"""
        def run_rollout(data):
            with multiprocessing.get_context({method!r}).Pool(1) as pool:
                OUT.write_text(json.dumps(pool.map(double, [Item(21)])[0].value))
        """
    )
    assert started.wait().is_returned, started.log()
    assert started.out() == 42


def test_an_async_run_rollout_is_completed(launcher: Launcher) -> None:
    started = launcher.start(
        """
        async def run_rollout(data):
            await asyncio.sleep(0)
            OUT.write_text("1")
        """
    )
    assert started.wait().is_returned
    assert started.out() == 1


def test_threads_left_by_run_rollout_are_waited_for(launcher: Launcher) -> None:
    started = launcher.start(
        """
        def finish():
            threading.main_thread().join()
            OUT.write_text("1")
        def run_rollout(data):
            threading.Thread(target=finish).start()
        """
    )
    assert started.wait().is_returned
    assert started.out() == 1


def test_an_exception_is_reported_with_its_traceback_and_logged(launcher: Launcher) -> None:
    started = launcher.start(
        """
        def deep(): raise KeyError("no such row")
        def run_rollout(data):
            threading.Thread(target=time.sleep, args=(600,)).start()
            print("before"); deep()
        """
    )
    report = started.wait()
    assert (report.is_returned, report.error, report.exit_code) == (False, "KeyError: 'no such row'", 1)
    assert "in deep" in report.traceback
    assert "runtime.py" not in report.traceback
    assert started.log()[0] == "before"
    assert started.log()[-1] == "KeyError: 'no such row'"


def test_the_hint_of_an_error_is_in_the_log(launcher: Launcher) -> None:
    started = launcher.start(
        """
        from forebay.core.errors import InvalidInput
        def run_rollout(data): raise InvalidInput("no engine", hint="name one")
        """
    )
    assert started.wait().error.endswith("InvalidInput: no engine")
    assert started.log()[-1] == "hint: name one"


@pytest.mark.parametrize(
    ("body", "is_returned", "exit_code"),
    [("sys.exit(0)", True, 0), ("sys.exit(3)", False, 1), ("os._exit(0)", False, 0), ("os.abort()", False, -6)],
)
def test_only_a_run_that_came_to_its_end_has_returned(
    launcher: Launcher, body: str, is_returned: bool, exit_code: int
) -> None:
    report = launcher.start(f"def run_rollout(data): {body}\n").wait()
    assert (report.is_returned, report.exit_code) == (is_returned, exit_code)


# Python does not notice a signal that comes just before it begins to wait: these wait again and again.


def test_sigterm_reaches_the_code_as_a_keyboard_interrupt(launcher: Launcher) -> None:
    started = launcher.start(
        """
        def run_rollout(data):
            try:
                OUT.write_text("[]")
                while True: threading.Event().wait(0.1)
            except KeyboardInterrupt:
                OUT.write_text('"tidied up"'); raise
        """
    )
    started.until_out()
    started.monitor.send_signal(signal.SIGTERM)
    assert started.wait().error == "KeyboardInterrupt"
    assert started.out() == "tidied up"
    assert started.log() == ["ended by SIGTERM: the run, or the server, was stopped"]


def test_sigterm_cancels_a_coroutine_cleanly(launcher: Launcher) -> None:
    started = launcher.start(
        """
        async def run_rollout(data):
            try:
                OUT.write_text("[]")
                while True: await asyncio.sleep(0.1)
            except asyncio.CancelledError:
                OUT.write_text('"cancelled"'); raise
        """
    )
    started.until_out()
    started.monitor.send_signal(signal.SIGTERM)
    assert not started.wait().is_returned
    assert started.out() == "cancelled"
    assert started.log() == ["ended by SIGTERM: the run, or the server, was stopped"]


def test_an_interrupt_of_the_code_s_own_is_in_the_log_with_its_place(launcher: Launcher) -> None:
    started = launcher.start(
        """
        def run_rollout(data):
            raise KeyboardInterrupt("mine")
        """
    )
    assert started.wait().error == "KeyboardInterrupt: mine"
    assert "in run_rollout" in started.log()[1]


@pytest.mark.parametrize("ending", ["return", "1 / 0", "os.kill(os.getpid(), 9)"])
def test_processes_that_the_code_started_end_with_it(launcher: Launcher, ending: str) -> None:
    started = launcher.start(
        f"""
        def run_rollout(data):
            other = subprocess.Popen(["sleep", "600"])
            OUT.write_text(json.dumps([os.getpid(), other.pid]))
            {ending}
        """
    )
    started.wait()
    until(lambda: not any(is_running(pid) for pid in started.out()))


def test_everything_dies_when_the_lifeline_closes_even_a_process_that_ignores_signals(launcher: Launcher) -> None:
    started = launcher.start(
        """
        def run_rollout(data):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            children()
            threading.Event().wait(600)
        """
    )
    pids = started.until_out()
    started.server.close()
    assert started.monitor.wait(timeout=60) == -signal.SIGKILL
    until(lambda: not any(is_running(pid) for pid in pids))


def test_the_run_process_dies_with_its_monitor(launcher: Launcher) -> None:
    started = launcher.start("def run_rollout(data):\n    OUT.write_text(str(os.getpid())); time.sleep(600)\n")
    pid = started.until_out()
    started.monitor.kill()
    until(lambda: not is_running(pid))


def test_output_is_kept_within_the_limit(launcher: Launcher) -> None:
    started = launcher.start(
        """
        def run_rollout(data):
            for number in range(20_000): print("line", number)
            subprocess.run(["echo", "from a child"])
        """,
        log_limit_bytes=20_000,
    )
    assert started.wait().is_returned
    assert started.log()[-2:] == ["line 19999", "from a child"]
    assert sum(path.stat().st_size for path in started.run_dir.glob("run.log*")) <= 20_000


def test_the_servers_token_stays_with_the_server() -> None:
    assert child_environment({"FOREBAY_TOKEN": "secret", "HOME": "/h"}) == {"HOME": "/h"}


def test_a_runtime_whose_monitor_is_gone_does_not_start(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    module = tmp_path / "x_generator.py"
    module.write_text(f"def run_rollout(data): open({str(ran)!r}, 'w')\n")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(frame(RunSpec(str(module), str(tmp_path), {}).encode()))
        argv = python_argv(RUNTIME, str(theirs.fileno()), "1")
        assert subprocess.run(argv, pass_fds=[theirs.fileno()], check=False).returncode == 1
    assert not ran.exists()


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
