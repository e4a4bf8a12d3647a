"""What a run's own code puts in place of its files, pipes, links and endless lines, costs the server nothing."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec

from forebay.telemetry.tracing.records import Head, RolloutSummary
from tests.conftest import MakeServer
from tests.kit import TIME_LIMIT_S, NativeRun, ServerProcess, make_group, poll_until, write_generator
from tests.steady_load import resident_bytes

STOP_LIMIT_S = 10.0
REPLY_S = 20.0
HOOKED = """
import threading
TASK_TYPE = "hooked"
def run_rollout(data):
    print("runs", flush=True)
    threading.Event().wait()
def is_valid_group(group_data, min_valid_group_size, task_type):
    return True, True
"""


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


KINDS: list[Callable[[Path], object]] = [
    make_socket,
    lambda path: path.symlink_to(path),
    lambda path: path.symlink_to("/dev/zero"),
    lambda path: path.mkdir(),
    os.mkfifo,
]


def start_hooked(server: ServerProcess) -> NativeRun:
    write_generator(server.generators, HOOKED, "hooked_generator.py")
    run = server.start_run("hooked", group_size=2)
    poll_until(lambda: server.client.get(f"{run.path}/log").json()["lines"])
    return run


def assert_ends_in_time(server: ServerProcess) -> None:
    began_s = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - began_s < STOP_LIMIT_S


def put(path: Path, kind: Callable[[Path], object]) -> None:
    """In place of what is there, as code of the run can."""
    path.parent.mkdir(exist_ok=True)
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)
    kind(path)


def test_what_is_no_regular_file_is_neither_waited_for_nor_read(make_server: MakeServer, tmp_path: Path) -> None:
    server = make_server(stop_limit_s=STOP_LIMIT_S, max_trace_bytes=1)
    run = start_hooked(server)
    folder = server.data_dir / "runs" / run.run_id
    start, trace = folder / "start-1", folder / "trace"
    with httpx.Client(base_url=server.url, timeout=REPLY_S) as client:
        for kind in KINDS:
            for path in ("run.log", "agents/some-uid.log", "hooks.log"):
                put(start / path, kind)
            for name in ("run-1-99999.1.jsonl", "other.jsonl"):
                put(trace / name, kind)
            assert "run.log cannot be read" in client.get(f"{run.path}/log").json()["lines"][0]
            assert client.get(f"{run.path}/log", params={"uid": "some-uid"}).status_code == 422
            assert client.get(f"{run.path}/trace").status_code == 200
            assert client.get("/metrics").status_code == 200
        # The host of its hooks has no place to print to: that costs the group.
        run.write(*make_group("judged", [0, 1]))
        read = client.post(f"{run.path}/batches", json={"num_groups": 1, "wait_s": 1})
        assert read.is_success, read.text
        (group,) = run.groups()
        assert (group["state"], group["reason"]) == ("discarded", "hook_failed")
        assert "hooks.log" in group["detail"]
        assert client.get("/healthz").is_success
    assert_ends_in_time(server)
    profiled = profile(trace)
    assert "Traceback" not in profiled.stderr, profiled.stderr


def profile(folder: Path) -> "subprocess.CompletedProcess[str]":
    """``forebay profile`` of a folder, by a process that has 1 GiB of memory."""
    command = [sys.executable, "-m", "forebay.server.cli", "profile", str(folder)]
    return subprocess.run(
        ["bash", "-c", 'ulimit -d 1048576; exec "$@"', "bash", *command],
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )


def test_a_line_without_end_is_skipped_and_counted(make_server: MakeServer) -> None:
    server = make_server(stop_limit_s=STOP_LIMIT_S)
    run = start_hooked(server)
    trace = server.data_dir / "runs" / run.run_id / "trace"
    trace.mkdir(exist_ok=True)
    head = msgspec.json.encode(
        Head(version=1, run_id=run.run_id, process="run", start=1, pid=99_999, wall_ns=1, mono_ns=1)
    )
    summary = msgspec.json.encode(RolloutSummary(t=1, d=1, id="1", uid="u", group="g", instance="i"))
    long = b'{"kind":"rollout"' + b"x" * (20 << 20)
    (trace / "run-1-99999.1.jsonl").write_bytes(b"\n".join([head, long, summary, b""]))
    before = resident_bytes(server)
    with (trace / "run-1-99999.2.jsonl").open("wb") as file:
        file.write(head + b"\n")
        file.truncate(512 << 20)  # a hole: it takes no room on the disk
    assert server.client.get("/metrics").is_success
    lines = server.client.get(f"{run.path}/trace").content.splitlines()
    assert summary in lines
    assert max(map(len, lines)) < 1 << 20
    assert resident_bytes(server) - before < 100 << 20
    assert_ends_in_time(server)
    profiled = profile(trace)
    assert profiled.returncode == 0, profiled.stderr
    assert "longer than 1 MiB" in " ".join((profiled.stdout + profiled.stderr).split()), "lines are wrapped"
