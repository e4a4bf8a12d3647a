"""CPU of a server's write with tracing on, against the same with tracing off, in turn."""

import os
import time
from pathlib import Path

import pytest

from tests.benchmarks.bodies import sample_body
from tests.benchmarks.load import post, send
from tests.benchmarks.machines import show
from tests.conftest import MakeServer
from tests.kit import ServerProcess, SlimeRun

pytestmark = pytest.mark.bench

TURNS = 60
NUM_WRITES = 500
WRITERS = 16
TARGET = 1.02
OFF = """
import forebay.server.tracing.run_traces as traces
from forebay.telemetry.tracing.tracer import NO_TRACE
traces.start_tracing = lambda *_: NO_TRACE
"""
"""Python imports a module of this name at its start."""


def test_tracing_costs_a_write_next_to_nothing(make_server: MakeServer, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(OFF)
    on = make_server(log_level="warning")
    off = make_server(log_level="warning", env={"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"})
    runs = [server.start_slime("load", group_size=8, max_buffer_size=1_000_000) for server in (on, off)]
    for run in runs:
        run.wait_for_state("running")
    used = {"on": 0, "off": 0}
    for turn in range(TURNS):
        # The one that comes first finds other caches than the other.
        pair = [("on", runs[0]), ("off", runs[1])]
        for name, run in pair if turn % 2 else reversed(pair):
            cpu = _write(run, turn)
            used[name] += cpu if turn >= 4 else 0
    assert _has_trace(on, runs[0])
    assert not _has_trace(off, runs[1])
    ratio = used["on"] / used["off"]
    num_writes = NUM_WRITES * (TURNS - 4)
    rows = [(name, ns / num_writes / 1e3) for name, ns in used.items()]
    show("CPU per write", ("tracing", "µs"), [*rows, ("ratio", ratio), ("target", TARGET)])
    assert ratio <= TARGET


def _write(run: SlimeRun, turn: int) -> int:
    """Nanoseconds of CPU that the server took for one turn's writes."""
    requests = [post(f"{run.prefix}/buffer/write", sample_body(i, 4_000, prefix=f"{turn}-")) for i in range(NUM_WRITES)]
    # Linux: the CPU-time clock of another process.
    clock = (~run.server.pid << 3) | 2
    began = time.clock_gettime_ns(clock)
    send(run.server.url, requests.__getitem__, len(requests), WRITERS)
    return time.clock_gettime_ns(clock) - began


def _has_trace(server: ServerProcess, run: SlimeRun) -> bool:
    folder = server.data_dir / "runs" / run.run_id / "trace"
    lines = [line for path in folder.glob("server-*.jsonl") for line in path.read_bytes().splitlines()]
    return any(line.startswith(b'{"kind":"group"') for line in lines)
